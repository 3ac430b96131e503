"""Print the table of results.json, or from another file of the same form.

usage: python experiments/demo/table.py [--results RESULTS.json]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from refusion_lit.reports.intervals import wilson

RESULTS = Path(__file__).with_name("results.json")
ORDER = ("Hybrid", "Masked", "BlockMasked", "Autoregressive")
HEAD = ("trained with", "decoder", "score", "tokens/forward", "tokens/s, alone", "times `Autoregressive`: alone")


def class_name(component: str | dict[str, Any]) -> str:
    """Return the class of a component, which is given by its name or with options."""
    return component if isinstance(component, str) else component["class_path"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: every decoder on the model that was trained for it, with speeds measured in turns."""
    rows = sorted(rows, key=lambda row: ORDER.index(class_name(row["model.objective"])))
    rows = [row for row in rows if row.get("latency")]  # a decoder that the model was not trained for is not timed
    sizes = sorted({size for row in rows for size in row["latency"]}, key=int)[1:]
    lines = ["| " + " | ".join([*HEAD, *(f"batch {size}" for size in sizes)]) + " |"]
    lines.append("| --- | --- |" + " --: |" * (len(HEAD) + len(sizes) - 2))
    for row in rows:
        score = wilson(round(row["score"] * row["num_prompts"]), row["num_prompts"])
        cells = [
            f"`{class_name(row['model.objective'])}`",
            f"`{class_name(row['model.decoders'][row['decoder']])}`",
            f"{score.estimate:.2f} ({score.low:.2f} to {score.high:.2f})",
            f"{row['tokens_per_forward']:.1f}",
            f"{row['latency']['1']['tokens_per_second']:.0f}",
            *(_times(row["latency"][size]["times_baseline"]) for size in ("1", *sizes)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(interval: list[float]) -> str:
    estimate, low, high = interval
    return "1" if low == high else f"{estimate:.1f} ({low:.1f} to {high:.1f})"


def main(results: Path = RESULTS) -> None:
    """Print a table.

    Args:
        results: The results of a sweep, as `experiments/collect_sweep.py` writes them.
    """
    print(table(json.loads(results.read_text(encoding="utf-8"))["rows"]))


if __name__ == "__main__":
    auto_cli(main)
