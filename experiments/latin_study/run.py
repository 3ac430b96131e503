"""Why does the hybrid model fail on Latin squares where the masked one succeeds? One change at a time.

usage: python experiments/latin_study/run.py [--work_dir runs/latin_study] [--output FILE] [--only NAME ...]

Every variant computes the same number of token positions in training, except those that say otherwise. Finished
variants are skipped; an interrupted one resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import refusion_lit
from refusion_lit.decoding import Decoder, FastDLLM, LLaDA, ReFusion
from refusion_lit.reports.environment import environment
from refusion_lit.tasks import Latin
from refusion_lit.types import Prompt, SamplingParams

HERE = Path(__file__).parent
COMPARISON = HERE.parent / "controlled_comparison"
sys.path[:0] = [str(COMPARISON), str(HERE)]
BUDGET, LENGTH, LAYERS = 8_000_000, 64, "model.backbone.config.num_hidden_layers"


@dataclass(frozen=True)
class Variant:
    """A training: its objective, its factor of the budget, and further options by name."""

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


def options_of(variant: Variant) -> list[str]:
    """Return what fit and the count of positions share."""
    configs = (COMPARISON / "common.yaml", COMPARISON / "task_latin.yaml")
    result = [item for path in configs for item in ("--config", str(path))]
    result += ["--model.objective", variant.objective]
    for name, value in variant.options.items():
        result += [f"--{name}", json.dumps(value)]
    return result


def train(name: str, variant: Variant, work: Path, scale: float) -> Path:
    """Train unless that is done; return the checkpoint."""
    from run import positions_a_step  # the controlled comparison's

    place = "".join(c if c.isalnum() else "_" for c in name)
    last = work / place / "fit" / "checkpoints" / "last.ckpt"
    done = last.parent.parent / "trained"
    if not done.exists():
        shared = options_of(variant)
        steps = max(1, round(scale * variant.budget * BUDGET / positions_a_step(shared)))
        options = [*shared, "--trainer.max_steps", str(steps), "--num_threads", "1", "--runs_dir", str(work)]
        options += ["--run_name", place, "--run_version", "fit"]
        options += ["--ckpt_path", str(last)] if last.exists() else []
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        subprocess.run([sys.executable, "-m", "refusion_lit.cli", "fit", *options], check=True, env=settings)
        done.touch()
    return last


def decoders_of(variant: Variant) -> dict[str, Decoder]:
    """Return the decoders that fit a variant: one token or slot at a time, and all above 0.9 or 0.99."""
    if variant.objective == "Masked":
        return {
            "one at a time": LLaDA(steps=LENGTH),
            "certain": FastDLLM(block_length=None, threshold=0.9),
            "almost sure": FastDLLM(block_length=None, threshold=0.99),
        }
    slots: dict[str, Any] = {"slot_size": variant.slot_size, "num_serial_blocks": 1, "forward_cost": 32}
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
    prompts = [Prompt(token_ids=tuple(model.encode(e.query)), id=e.id) for e in examples]
    found = {}
    for name, decoder in decoders_of(variant).items():
        output = model.decode(prompts, decoder, SamplingParams(max_new_tokens=LENGTH), batch_size=50)
        tokens, forwards = (sum(getattr(row, key) for row in output.rows) for key in ("num_tokens", "num_forwards"))
        scores = [task.score(e, row.text) for e, row in zip(examples, output.rows, strict=True)]
        found[name] = {"score": sum(scores) / len(scores), "tokens_per_forward": round(tokens / forwards, 3)}
    return found


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work_dir", type=Path, default=Path("runs/latin_study"))
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--num_prompts", type=int, default=200)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all budgets")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.only:
        part = args.work_dir / f"{name}.json"
        if not part.exists():
            checkpoint = train(name, VARIANTS[name], args.work_dir, args.scale)
            part.write_text(json.dumps(measure(VARIANTS[name], checkpoint, args.num_prompts)))
        results[name] = json.loads(part.read_text())
        print(name, results[name], flush=True)
    written = {"budget": args.scale * BUDGET, "results": results}
    written["environment"] = environment(0, ["python", "experiments/latin_study/run.py"])
    args.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
