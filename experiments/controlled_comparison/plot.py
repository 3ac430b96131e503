"""The tables and the plot of results.json and more.json; `nox -s figures` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

TASKS = ("sheet", "walk", "latin")
STYLES = {
    "hybrid": ("#00796b", "o"),
    "autoregressive": ("#555555", "s"),
    "masked": ("#c2410c", "^"),
    "block": ("#1d4ed8", "D"),
    "dual_stream": ("#9333ea", "v"),
    "soft_tail": ("#be185d", "P"),
    "diffusion_forcing": ("#0891b2", "X"),
    "staggered": ("#65a30d", "<"),
    "editable": ("#a16207", ">"),
    "sdar": ("#0f172a", "d"),
    "zarya": ("#ea580c", "*"),
}

Run = dict[str, Any]
Point = tuple[float, float, float, list[float]]


def points(runs: list[Run], task: str, objective: str, split: str = "results") -> dict[str, Point]:
    """Return for each decoder means over seeds of tokens per forward, positions per token and score; and all scores.

    The split is ``results`` for the test prompts or ``validation``.
    """
    same = [run for run in runs if run["budget_factor"] == 1]
    matching = [run for run in same if (run["task"], run["objective"]) == (task, objective)]
    if not matching or any(split not in run for run in matching):
        return {}
    chosen = [run[split] for run in matching]
    return {
        name: (
            mean(results[name]["tokens_per_forward"] for results in chosen),
            mean(results[name]["positions_per_token"] for results in chosen),
            mean(results[name]["score"] for results in chosen),
            [results[name]["score"] for results in chosen],
        )
        for name in chosen[0]
    }


def table(runs: list[Run], more: dict[str, Any]) -> str:
    """Return every decoder of every model as a Markdown table, those of more.py last."""
    lines = [
        "| task | objective | decoder | score | by seed | tokens/forward | positions/token |",
        "| --- | --- | --- | --: | --- | --: | --: |",
    ]
    for task in TASKS:
        for objective in STYLES:
            for name, (speed, positions, score, scores) in points(runs, task, objective).items():
                lines.append(_line(task, objective, name, (score, speed, positions), scores))
        for run in runs:
            if run["task"] == task and run["budget_factor"] != 1:
                objective = f"{run['objective']}, {run['budget_factor']:g} times the budget"
                lines += _single(task, objective, run["results"])
    for objective, figures in more["results"].items():
        lines += _single(more["task"], f"{objective}, more.py", figures)
    return "\n".join(lines)


def _single(task: str, objective: str, figures: dict[str, Any]) -> Iterator[str]:
    for name, values in figures.items():
        cells = tuple(values[key] for key in ("score", "tokens_per_forward", "positions_per_token"))
        yield _line(task, objective, name, cells, cells[:1])


def _line(task: str, objective: str, decoder: str, cells: Sequence[float], scores: Sequence[float]) -> str:
    score, speed, positions = cells
    seeds = ", ".join(f"{value:.3f}" for value in scores)
    return f"| {task} | {objective} | `{decoder}` | {score:.3f} | {seeds} | {speed:.2f} | {positions:.1f} |"


FAMILIES = (
    ("hybrid, ReFusion", "hybrid", "refusion"),
    ("autoregressive", "autoregressive", ""),
    ("masked, LLaDA, one token per step", "masked", "llada_1"),
    ("masked, Fast-dLLM, whole canvas, threshold 0.9", "masked", "fast_dllm_whole_t90"),
    ("block diffusion", "block", ""),
)
"""Rows of the table of families: label, objective, a setting or how the names of those to choose from begin."""
SUCCESSORS = (
    ("hybrid, ReFusion, for comparison", "hybrid", "refusion_8_t90"),
    ("soft tail, CARD", "soft_tail", "card_t90_8"),
    ("diffusion forcing, D2F", "diffusion_forcing", "d2f_t90"),
    ("staggered sets, set diffusion", "staggered", "sets_16_t90"),
    ("dual stream, WeDLM", "dual_stream", "wedlm_16_e40"),
    ("editable blocks, token editing", "editable", "editing_t95_90"),
    ("block diffusion in blocks of 4, SDAR", "sdar", "sdar_t85"),
    ("hybrid with Zarya's options, ReFusion", "zarya", "refusion_8_t90"),
)
"""One setting each, that of ``configs``: these runs have no validation figures to choose by."""


def best(runs: list[Run], rows: Sequence[tuple[str, str, str]], tasks: Sequence[str]) -> str:
    """Return each family's setting: score by seed, tokens per forward, positions per token.

    Of several settings the one with the highest mean score on validation prompts is shown, and of equal ones the one
    with the most tokens per forward there. The test prompts choose nothing.

    Raises:
        KeyError: If there are several settings, and no validation figures.
    """
    lines = [f"| | {' | '.join(tasks)} |", "| --- |" + " --- |" * len(tasks)]
    for label, objective, setting in rows:
        cells = []
        for task in tasks:
            curve = points(runs, task, objective)
            names = [setting] if setting in curve else [name for name in curve if name.startswith(setting)]
            if len(names) > 1:
                judge = points(runs, task, objective, "validation")
                names = [max(names, key=lambda name: (round(judge[name][2], 6), judge[name][0]))]
            speed, positions, score, scores = curve[names[0]]
            seeds = f" ({', '.join(f'{value:.2f}' for value in scores)})" if len(scores) > 1 else ""
            cells.append(f"{score:.3f}{seeds}, {speed:.1f}, {positions:.1f}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


UNTRAINED = (
    ("hybrid", "`ReFusion`, one serial block", "hybrid", ("refusion_8_t90",)),
    ("hybrid", "`SlotSearch`, beam of 1 and of 4", "hybrid", ("search_beam_1", "search_beam_4")),
    ("hybrid", "`FirstHitting`, 8, 16 and 32 steps", "hybrid", tuple(f"first_hitting_{n}" for n in (8, 16, 32))),
    (
        "masked", "`LLaDA` without blocks, 1, 2 and 4 tokens per step", "masked",
        tuple(f"llada_whole_{n}" for n in (1, 2, 4)),
    ),
    ("masked", "the same with a kernel of 8, 2 and 4 tokens per step", "masked", ("conv_8_2", "conv_8_4")),
    ("masked", "with a kernel of 32, 2 and 4 tokens per step", "masked", ("conv_32_2", "conv_32_4")),
    (
        "masked, then R2FT", "`LLaDA` without blocks, 2 and 4 tokens per step", "r2ft",
        ("llada_whole_2", "llada_whole_4"),
    ),
    ("masked, then R2FT", "with a kernel of 8, 2 and 4 tokens per step", "r2ft", ("conv_8_2", "conv_8_4")),
    ("masked, then R2FT", "with a kernel of 32, 2 and 4 tokens per step", "r2ft", ("conv_32_2", "conv_32_4")),
    (
        "masked and autoregressive", "`APD`, weights 0.3, 0.5, 0.7, 0.9", "masked",
        tuple(f"apd_r{n}" for n in (30, 50, 70, 90)),
    ),
)  # fmt: skip
"""Rows of the table of more.json: model and decoder as shown, then where they are found."""


def untrained(more: dict[str, Any]) -> str:
    """Return what more.py has decoded: score, tokens per forward, positions per token of each setting."""
    lines = ["| model | decoder | |", "| --- | --- | --- |"]
    for model, decoder, key, names in UNTRAINED:
        cells = [
            f"{figures['score']:.3f}, {figures['tokens_per_forward']:.1f}, {figures['positions_per_token']:.1f}"
            for figures in (more["results"][key][name] for name in names)
        ]
        lines.append(f"| {model} | {decoder} | {'; '.join(cells)} |")
    return "\n".join(lines)


def drawn(runs: list[Run]) -> dict[str, Any]:
    """Return what the plot shows: by task its seeds, and each objective's tokens per forward and scores."""
    shown: dict[str, Any] = {}
    for task in TASKS:
        curves = {objective: points(runs, task, objective) for objective in STYLES}
        shown[task] = {
            "seeds": sorted({run["seed"] for run in runs if run["task"] == task}),
            "points": {name: [point[::2][:2] for point in value.values()] for name, value in curves.items() if value},
        }
    return shown


def draw(shown: dict[str, Any], path: Path) -> None:
    """Draw what :func:`drawn` returns, one panel per task and one colour per objective."""
    figure, axes = plt.subplots(1, len(shown), figsize=(13, 4.2), sharey=True)
    for axis, (task, values) in zip(axes, shown.items(), strict=True):
        for objective, curve in values["points"].items():
            colour, marker = STYLES[objective]
            speeds, scores = zip(*curve, strict=True)
            axis.scatter(speeds, scores, c=colour, marker=marker, s=42, alpha=0.75, label=objective)
        seeds = values["seeds"]
        axis.set_title(f"{task} (one to {len(seeds)} seeds per model)" if len(seeds) > 1 else f"{task} (one seed)")
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.5, 1, 2, 4, 8, 16, 32], ["0.5", "1", "2", "4", "8", "16", "32"])
        axis.set_xlabel("tokens per forward")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("score on 200 test prompts")
    axes[0].set_ylim(-0.03, 1.03)
    axes[-1].legend(*axes[1].get_legend_handles_labels(), loc="upper right", fontsize=8)  # walk has all objectives
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
