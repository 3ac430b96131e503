"""Why does the hybrid model fail on Latin squares where the masked one succeeds? One change at a time.

usage: python experiments/latin_study/run.py [--work_dir runs/latin_study] [--output FILE] [--only NAME ...]

Every variant computes the same number of token positions in training, unless its name says otherwise. Finished
variants are skipped; an interrupted one resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.decoding import Decoder, FastDLLM, LLaDA, ReFusion
from refusion_lit.reports.results import environment
from refusion_lit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, decode_examples, kept, read_environment, train, write_json
from experiments.controlled_comparison.run import positions_a_step
from experiments.tasks import Latin

HERE = Path(__file__).parent
COMPARISON = HERE.parent / "controlled_comparison"
BUDGET, LENGTH, LAYERS = 8_000_000, 64, "model.backbone.config.num_hidden_layers"


@dataclass(frozen=True)
class Variant:
    """A training: its objective, its factor of the budget, and a mapping of further options."""

    objective: str
    budget: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def slot_size(self) -> int:
        """Slot size to decode with: 1 if it was trained, else the largest one up to 8."""
        sizes = self.options.get("model.objective.init_args.slot_sizes", [8])
        return 1 if 1 in sizes else min(8, max(sizes))


def hybrid(sizes: list[int], budget: float = 1.0, **more: Any) -> Variant:
    """Return a variant with these slot sizes."""
    options = {f"model.objective.init_args.{name}": value for name, value in more.items()}
    return Variant("Hybrid", budget, {"model.objective.init_args.slot_sizes": sizes, **options})


VARIANTS = {
    "hybrid, slots of 4 to 32 (the recipe)": hybrid([4, 8, 16, 32]),
    "hybrid, slots of 4": hybrid([4]),
    "hybrid, slots of 2": hybrid([2]),
    "hybrid, slots of 1": hybrid([1]),
    "hybrid, slots of 1, 2, 4 and 8": hybrid([1, 2, 4, 8]),
    "hybrid, slots of 1, 6 layers": Variant("Hybrid", 1.0, {**hybrid([1]).options, LAYERS: 6}),
    "hybrid, slots of 1, twice the positions": hybrid([1], 2.0),
    "hybrid, slots of 1, more masks": Variant(
        "objectives.SkewedHybrid", 1.0, {**hybrid([1]).options, "model.objective.init_args.power": 0.5}
    ),
    "hybrid, slots of 1, fewer masks": Variant(
        "objectives.SkewedHybrid", 1.0, {**hybrid([1]).options, "model.objective.init_args.power": 2.0}
    ),
    "masked, bidirectional": Variant("Masked", 1.0, {"model.objective.init_args.pad_responses_to": LENGTH}),
}


def list_options(variant: Variant) -> list[str]:
    """Return what fit and the count of positions share."""
    result = configs(COMPARISON / "common.yaml", COMPARISON / "task_latin.yaml")
    result += ["--model.objective", variant.objective]
    for name, value in variant.options.items():
        result += [f"--{name}", json.dumps(value)]
    return result


def trained(name: str, work: Path, scale: float) -> Path:
    """Train unless that is done; return the checkpoint."""
    variant = VARIANTS[name]
    run = work / "".join(c if c.isalnum() else "_" for c in name) / "fit"
    options = list_options(variant)
    steps = max(1, round(scale * variant.budget * BUDGET / positions_a_step(options)))
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # for objectives.py
    return train(run, *options, "--trainer.max_steps", str(steps), PYTHONPATH=paths)


def make_decoders(variant: Variant) -> dict[str, Decoder]:
    """Return the decoders that fit a variant: one token or slot at a time, and all above 0.9 or 0.99."""
    if variant.objective == "Masked":
        return {
            "one at a time": LLaDA(steps=LENGTH),
            "certain": FastDLLM(block_length=None, threshold=0.9),
            "almost sure": FastDLLM(block_length=None, threshold=0.99),
        }
    slots: dict[str, Any] = {"slot_size": variant.slot_size, "num_serial_blocks": 1}
    sure: dict[str, Any] = {"slot_threshold": 0.99, "token_threshold": 0.99}
    sizes = variant.options["model.objective.init_args.slot_sizes"]
    larger = {f"slots of {size}": ReFusion(**{**slots, "slot_size": size}, **sure)
              for size in sizes if 1 in sizes and size > 1}  # fmt: skip
    return {
        "one at a time": ReFusion(**slots, selection="top_k", k=1),
        "left to right": ReFusion(**slots, selection="sequential"),
        "random order": ReFusion(**slots, selection="random"),
        "certain": ReFusion(**slots),
        "almost sure": ReFusion(**slots, **sure),
        **larger,
    }


def measure(variant: Variant, checkpoint: Path, num_prompts: int) -> dict[str, Any]:
    """Decode the test prompts of the controlled comparison."""
    model = refusion_lit.load(checkpoint)
    task = Latin(num_train=400_000, num_validation=256, num_test=200)
    examples = list(task.examples("test"))[:num_prompts]
    sampling, by_decoder = SamplingParams(max_new_tokens=LENGTH), {}
    for name, decoder in make_decoders(variant).items():
        _, figures = decode_examples(model, examples, task.score, decoder, sampling)
        by_decoder[name] = {"score": figures["score"], "tokens_per_forward": round(figures["tokens_per_forward"], 3)}
        print(name, by_decoder[name], flush=True)
    return by_decoder


def entry(name: str, work: Path, scale: float, num_prompts: int) -> dict[str, Any]:
    """Train a variant and decode with it; return its figures by decoder, and the environments of both."""
    checkpoint = trained(name, work, scale)
    training = read_environment(checkpoint.parents[1])
    # Each variant has its own: they are trained on different days, by different commits.
    decoding = environment(0, ["python", "experiments/latin_study/run.py"])
    figures = measure(VARIANTS[name], checkpoint, num_prompts)
    return {**figures, "environment": {"training": training, "decoding": decoding}}


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/latin_study", HERE / "results.json")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--num_prompts", type=int, default=200)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all budgets")
    args = parser.parse_args()
    options = (args.work_dir, args.scale, args.num_prompts)
    results = {name: kept(args.work_dir / f"{name}.json", entry, name, *options) for name in args.only}
    write_json(args.output, {"budget": args.scale * BUDGET, "results": results})


if __name__ == "__main__":
    main()
