"""Is a drafter ever slower than none, by default?

usage: python experiments/lossless/default.py [--dtypes TYPE ...] [--batch_sizes N ...] [--rounds N]
           [--prompts FILE@NUMBER] [--output FILE]

Decodes the prompts of chat.jsonl in batches, in float32 and bfloat16, with `Autoregressive`, the default of
`SelfSpeculative` and `Autoregressive` again, in turn on each batch, so that other work on the machine meets all. What
the second `Autoregressive` differs by from the first is noise. Times are processor time of one thread, the best of
several rounds per batch; from eight batches on with a 95 % interval. It also fits the cost of a forward,
a + b * positions, and of a drafter's adapters. What the output holds of other types and batch sizes is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, SelfSpeculative
from refusion_lit.modeling.load import DType
from refusion_lit.reports.results import environment
from refusion_lit.types import Prompt, SamplingParams

sys.path.append(str(Path(__file__).parents[2]))

from experiments.common import write_json
from experiments.lossless.table import BASE, HERE, read_prompts, speed_over

CONTROL = "Autoregressive again"
DECODERS: dict[str, Decoder] = {
    "Autoregressive": Autoregressive(),
    "SelfSpeculative": SelfSpeculative(),
    CONTROL: Autoregressive(),
}
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
POSITIONS = (2, 4, 8, 16, 24)


def compared(
    model: refusion_lit.TextModel, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Decode prompts with all decoders in turn; return the ratio of their tokens per second and what else differs."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    groups = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    best = {name: [float("inf")] * len(groups) for name in DECODERS}
    measured: dict[str, list[Any]] = {name: [[]] * len(groups) for name in DECODERS}
    for turn in range(rounds):
        for number, group in enumerate(groups):
            names = list(DECODERS)
            first = (turn + number) % len(names)
            for name in names[first:] + names[:first]:
                decoder = DECODERS[name]
                model.decode(group[:1], decoder, SamplingParams(max_new_tokens=4))  # warms up
                started = time.process_time()
                measured[name][number] = model.decode(group, decoder, sampling, batch_size=batch_size).rows
                best[name][number] = min(best[name][number], time.process_time() - started)
    rows = {name: [row for group in groups for row in group] for name, groups in measured.items()}
    counts = {name: [sum(row.num_tokens for row in group) for group in groups] for name, groups in measured.items()}
    tokens = {name: sum(values) for name, values in counts.items()}
    drafts, none = ((counts[name], best[name]) for name in ("SelfSpeculative", "Autoregressive"))
    exact, drafted = rows["Autoregressive"], rows["SelfSpeculative"]
    speed = {name: tokens[name] / sum(best[name]) for name in DECODERS}
    return {
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "same_forwards": [row.forward_shapes for row in exact] == [row.forward_shapes for row in drafted],
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(exact, drafted, strict=True)),
        "num_decodes": len(exact),
        "tokens_per_forward": round(tokens["SelfSpeculative"] / sum(row.num_forwards for row in drafted), 3),
        "tokens_per_second": {name: round(value, 2) for name, value in speed.items()},
        **speed_over("autoregressive", *drafts, *none),
        "control_over_autoregressive": round(speed[CONTROL] / speed["Autoregressive"], 3),
    }


def forward_cost(model: refusion_lit.TextModel) -> dict[str, float]:
    """Fit the best processor times of forwards of several positions to a + b * positions.

    Beside them, the share of a that forwards of up to eight positions take longer if all but the first are draft masks.
    """
    backbone = model.backbone
    masks = torch.tensor(backbone.special_tokens.draft_token_ids)
    points, longer = [], []
    with torch.no_grad():
        run = backbone.runner()
        for count in POSITIONS:
            plain = torch.full((1, count), 100)
            drafting = torch.cat((plain[:, :1], masks[torch.arange(count - 1) % len(masks)][None]), 1)
            places, visible = torch.arange(count)[None], torch.ones(1, count, count, dtype=torch.bool).tril()
            best = [float("inf")] * 2
            for _ in range(20):
                for kind, ids in enumerate((plain, drafting)):
                    started = time.process_time()
                    backbone.logits(run(ids, places, visible)[0])
                    best[kind] = min(best[kind], 1000 * (time.process_time() - started))
            points.append((count, best[0]))
            longer += [best[1] - best[0]] if count <= 8 else []
    x, y = (torch.tensor(values, dtype=torch.float64) for values in zip(*points, strict=True))
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    fixed = float(y.mean()) - slope * float(x.mean())
    return {
        "fixed_ms": round(fixed, 2),
        "position_ms": round(slope, 3),
        "positions": round(fixed / slope, 1),
        "adapters": round(sum(longer) / len(longer) / fixed, 3),
    }


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default=f"{HERE / 'chat.jsonl'}@20")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=1, help="how often each batch is decoded")
    parser.add_argument("--output", type=Path, default=HERE / "default_epyc.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"types": {}, "environments": []}
    if options.output.exists():
        result = json.loads(options.output.read_text(encoding="utf-8"))
    result["environments"].append(environment(0, sys.argv))
    for dtype in options.dtypes:
        model = refusion_lit.load(BASE, dtype=dtype, draft=HERE / "drafter")
        prompts = read_prompts(model, *options.prompts.split("@"))
        values = result["types"].setdefault(dtype, {"batches": []})
        values["forward_cost"] = forward_cost(model)
        for size in options.batch_sizes:
            figures = compared(model, prompts, size, options.max_new_tokens, options.rounds)
            kept = [row for row in values["batches"] if row["batch_size"] != size]
            values["batches"] = sorted([*kept, figures], key=lambda row: row["batch_size"])
            print(dtype, figures, flush=True)
            write_json(options.output, result)


if __name__ == "__main__":
    main()
