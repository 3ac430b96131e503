"""Draw results.json, a panel a task and a colour an objective; write table.md, with more.json.

usage: python experiments/controlled_comparison/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
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


Point = tuple[float, float, float, list[float]]


def points(runs: list[dict[str, Any]], task: str, objective: str) -> dict[str, Point]:
    """Return for each decoder means over seeds of tokens a forward, positions a token and score; and all scores."""
    same = [run for run in runs if run["budget_factor"] == 1]
    chosen = [run["results"] for run in same if (run["task"], run["objective"]) == (task, objective)]
    if not chosen:
        return {}
    return {
        name: (
            mean(results[name]["tokens_per_forward"] for results in chosen),
            mean(results[name]["positions_per_token"] for results in chosen),
            mean(results[name]["score"] for results in chosen),
            [results[name]["score"] for results in chosen],
        )
        for name in chosen[0]
    }


def more_lines() -> list[str]:
    """Return the table's lines for what more.py has decoded."""
    path = HERE / "more.json"
    if not path.exists():
        return []
    more = json.loads(path.read_text())
    return [
        f"| {more['task']} | {objective}, more.py | `{name}` | {values['score']:.3f} | {values['score']:.3f} | "
        f"{values['tokens_per_forward']:.2f} | {values['positions_per_token']:.1f} |"
        for objective, found in more["results"].items()
        for name, values in found.items()
    ]


def main() -> None:
    """Write score_vs_tokens_per_forward.png and table.md."""
    runs = json.loads((HERE / "results.json").read_text())["runs"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), sharey=True)
    lines = [
        "| task | objective | decoder | score | by seed | tokens/forward | positions/token |",
        "| --- | --- | --- | --: | --- | --: | --: |",
    ]
    for axis, task in zip(axes, TASKS, strict=True):
        for objective, (colour, marker) in STYLES.items():
            found = points(runs, task, objective)
            if not found:
                continue
            axis.scatter(
                [x for x, _, _, _ in found.values()],
                [y for _, _, y, _ in found.values()],
                c=colour, marker=marker, s=42, alpha=0.75, label=objective,
            )  # fmt: skip
            for name, (x, positions, y, scores) in found.items():
                seeds = ", ".join(f"{score:.3f}" for score in scores)
                lines.append(f"| {task} | {objective} | `{name}` | {y:.3f} | {seeds} | {x:.2f} | {positions:.1f} |")
        for run in runs:
            if run["task"] == task and run["budget_factor"] != 1:
                for name, values in run["results"].items():
                    lines.append(
                        f"| {task} | {run['objective']}, {run['budget_factor']:g} times the budget | `{name}` | "
                        f"{values['score']:.3f} | {values['score']:.3f} | {values['tokens_per_forward']:.2f} | "
                        f"{values['positions_per_token']:.1f} |"
                    )
        seeds = sorted({run["seed"] for run in runs if run["task"] == task})
        axis.set_title(f"{task} ({'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))})")
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.5, 1, 2, 4, 8, 16, 32], ["0.5", "1", "2", "4", "8", "16", "32"])
        axis.set_xlabel("tokens per forward")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("score on 200 test prompts")
    axes[0].set_ylim(-0.03, 1.03)
    axes[-1].legend(*axes[1].get_legend_handles_labels(), loc="upper right", fontsize=8)  # walk has all objectives
    figure.tight_layout()
    figure.savefig(HERE / "score_vs_tokens_per_forward.png", dpi=110)
    (HERE / "table.md").write_text("\n".join([*lines, *more_lines()]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
