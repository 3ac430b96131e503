"""What do bonus tokens give on models that are trained well, and on a model with noise?

usage: python experiments/refusion_pays/small_models.py [--output FILE]

Decodes the prompts of ReFusion's reference outputs, in the same settings, with each `infill`, alone and greedily, on
the two models of the reference outputs. Counts only: no figure here depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import refusion_lit
from refusion_lit.decoding import ReFusion
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import write_json

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
MODELS = ("clean", "mid")
INFILLS = ("mask", "autoregressive", "bonus")
FORWARD_COSTS = (32.0, 256.0)
"""Fixed cost of a forward in positions, by default on a CPU and on accelerators: it decides what rides along."""


def measured(model: refusion_lit.TextModel, golden: dict[str, Any], infill: Any, forward_cost: float) -> dict[str, Any]:
    """Decode all runs of a file of reference outputs; return counts."""
    counts = {"num_prompts": 0, "num_right": 0, "num_tokens": 0, "num_forwards": 0, "num_positions": 0}
    for run in golden["runs"]:
        setting = golden["settings"][run["setting"]]
        # Bonus tokens give one text for all thresholds from 0.5 on.
        threshold = max(setting["token_threshold"], 0.5 if infill == "bonus" else 0.0)
        decoder = ReFusion(
            slot_size=setting["slot_size"], num_serial_blocks=setting["serial_num_blocks"],
            slot_threshold=setting["slot_threshold"], token_threshold=threshold, infill=infill,
        )  # fmt: skip
        prompt = Prompt(token_ids=tuple(run["prompt"]), id=str(counts["num_prompts"]))
        sampling = SamplingParams(max_new_tokens=setting["gen_length"])
        with patch.object(type(model.backbone), "forward_cost", forward_cost):
            [row] = model.decode([prompt], decoder, sampling).rows
        counts["num_prompts"] += 1
        counts["num_right"] += row.token_ids == run["target"]
        counts["num_tokens"] += row.num_tokens
        counts["num_forwards"] += row.num_forwards
        counts["num_positions"] += row.num_positions
    return counts


def main() -> None:
    """Decode with all options and write the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("small_models.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in MODELS:
        model = refusion_lit.load(GOLDENS / "models" / f"additions-{name}", device="cpu", dtype="float32")
        golden = json.loads((GOLDENS / f"refusion_decode_{name}.json").read_text(encoding="utf-8"))
        for infill in INFILLS:
            for cost in FORWARD_COSTS if infill == "bonus" else FORWARD_COSTS[:1]:
                counts = measured(model, golden, infill, cost)
                rows.append({"model": name, "infill": infill, "forward_cost": cost, **counts})
                print(rows[-1], flush=True)
    write_json(args.output, {"rows": rows, "environment": environment(0, sys.argv)})


if __name__ == "__main__":
    main()
