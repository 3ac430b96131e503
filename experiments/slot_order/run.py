"""What the order of slots is worth: the same models, the same filling of slots, other orders.

usage: python experiments/slot_order/run.py [--work_dir runs/slot_order] [--output FILE] [--tasks walk latin sudoku]

Trains a hybrid model on each task unless its checkpoint is there, then decodes the test prompts slot by slot in each
order. Finished parts are skipped, so it can be killed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import yaml

import refusion_lit
from refusion_lit.contrib import SlotSearch
from refusion_lit.decoding import Decoder, GenerationCallback, ReFusion, RowState
from refusion_lit.reports.results import environment
from refusion_lit.types import SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import argument_parser, configs, decode_examples, kept, seeds, train, write_json

from experiments import tasks

HERE = Path(__file__).parent
COMPARISON = HERE.parent / "controlled_comparison"
STEPS = {"walk": 4000, "latin": 4000, "sudoku": 4000}
SLOT_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class FromKnownEnd(ReFusion):
    """Slots from the end that the prompt knows: the best order for walks.

    Attributes:
        backwards_token_id: A prompt that begins with this token is decoded from right to left.
    """

    backwards_token_id: int

    def _chosen(self, state: Any, confidences: Sequence[float]) -> list[int]:
        is_backwards = state.prompt.token_ids[0] == self.backwards_token_id
        return [len(confidences) - 1 if is_backwards else 0]


# One slot per round, filled token by token: with a token threshold of 1 no draft of a plan survives its verification.
_PLAIN: dict[str, Any] = {
    "slot_size": SLOT_SIZE, "num_serial_blocks": 1, "token_threshold": 1.0, "infill": "autoregressive",
}  # fmt: skip
_SEARCH: dict[str, Any] = {"slot_size": SLOT_SIZE, "num_serial_blocks": 1, "max_candidates": 4}
ORDERS: dict[str, Decoder] = {
    "sequential": ReFusion(**_PLAIN, selection="sequential"),
    "random": ReFusion(**_PLAIN, selection="random"),
    "confidence": ReFusion(**_PLAIN, selection="top_k", k=1),
    "best next (beam of 1)": SlotSearch(**_SEARCH, selection="beam", beam_size=1),
    "beam of 4": SlotSearch(**_SEARCH, selection="beam", beam_size=4),
    "tree search, 8 simulations": SlotSearch(**_SEARCH, num_simulations=8, horizon=2),
    "ReFusion, all certain slots": ReFusion(slot_size=SLOT_SIZE, num_serial_blocks=1),
}


class Orders(GenerationCallback):
    """Remembers the order in which each prompt's slots were committed."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        """Take the slots in the order of their first token."""
        self.of[index] = list(dict.fromkeys(place // SLOT_SIZE for place in state.committed))


def sequential_share(orders: Sequence[Sequence[int]]) -> float:
    """Return the share of pairs of slots that were committed in text order; 0.5 is chance."""
    pairs = sum(comb(len(order), 2) for order in orders)
    right = sum(a < b for order in orders for i, a in enumerate(order) for b in order[i + 1 :])
    return right / pairs if pairs else 1.0


def find_config(task: str) -> Path:
    """Return the overlay of a task."""
    return next(path for path in (HERE / f"task_{task}.yaml", COMPARISON / f"task_{task}.yaml") if path.exists())


def trained(task: str, seed: int, work: Path, steps: int) -> Path:
    """Train a model unless it is there; return its checkpoint."""
    options = configs(COMPARISON / "common.yaml", find_config(task), HERE / "model.yaml")
    return train(work / f"{task}_seed{seed}" / "fit", *options, *seeds(seed), "--trainer.max_steps", str(steps))


def measure(task: str, work: Path, steps: int, num_prompts: int, seed: int) -> dict[str, Any]:
    """Train a model unless it is there, and decode the test prompts in each order."""
    model = refusion_lit.load(trained(task, seed, work, steps))
    values = yaml.safe_load(find_config(task).read_text())
    options = values["data"]["task"]
    test = getattr(tasks, options["class_path"].rpartition(".")[2])(**options["init_args"])
    examples = list(test.examples("test"))[:num_prompts]
    sampling = SamplingParams(max_new_tokens=values["model"]["sampling"]["max_new_tokens"], seed=seed)
    decoders = dict(ORDERS)
    if task == "walk":
        decoders["from the known end"] = FromKnownEnd(**_PLAIN, backwards_token_id=model.encode("<")[0])
    by_order = {}
    for name, decoder in decoders.items():
        seen = Orders()
        scores, figures = decode_examples(model, examples, test.score, decoder, sampling, [seen])
        by_order[name] = {
            "score": figures["score"],
            "tokens_per_forward": round(figures["tokens_per_forward"], 3),
            "positions_per_token": round(figures["positions_per_token"], 2),
            "share_in_text_order": round(sequential_share(list(seen.of.values())), 3),
        }
        if task == "walk":
            kinds = {"forwards": ">", "backwards": "<"}
            for kind, sign in kinds.items():
                chosen = [score for e, score in zip(examples, scores, strict=True) if e.query.startswith(sign)]
                by_order[name][f"score_{kind}"] = round(sum(chosen) / max(len(chosen), 1), 4)
        print(task, name, by_order[name], flush=True)
    return by_order


def main() -> None:
    """Run and write the result."""
    parser = argument_parser(__doc__, "runs/slot_order", HERE / "results.json")
    parser.add_argument("--num_prompts", type=int, default=200)
    parser.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="number of training steps, in place of the task's number")
    args = parser.parse_args()
    results = {}
    for task in args.tasks:
        options = (args.work_dir, args.steps or STEPS[task], args.num_prompts, args.seed)
        results[task] = kept(args.work_dir / f"{task}.json", measure, task, *options)
    command = ["python", "experiments/slot_order/run.py"]
    config = {"num_prompts": args.num_prompts, "steps": STEPS if args.steps is None else args.steps}
    written = {"config": config, "results": results, "environment": environment(args.seed, command)}
    write_json(args.output, written)


if __name__ == "__main__":
    main()
