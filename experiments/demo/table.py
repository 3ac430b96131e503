"""Print the table of results.json, or from another file of the same form.

usage: python experiments/demo/table.py [RESULTS.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
ORDER = ("Hybrid", "Masked", "BlockMasked", "Autoregressive")


def class_name(component: str | dict[str, Any]) -> str:
    """Return the class of a component, which is given by its name or with options."""
    return component if isinstance(component, str) else component["class_path"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: each decoder on the model of its own family, then mismatches."""
    rows = [{**row, "objective": class_name(row["model.objective"])} for row in rows]
    rows.sort(key=lambda row: (bool(row["mismatch"]), ORDER.index(row["objective"])))
    lines = [
        "| trained with | decoder | score | tokens/forward | forwards | positions/token |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        mark = r" \*" if row["mismatch"] else ""
        figures = f"{row['score']:.3f} | {row['tokens_per_forward']:.2f} | {row['num_forwards']}"
        figures += f" | {row['positions_per_token']:.1f}"
        decoder = class_name(row["model.decoders"][row["decoder"]])
        lines.append(f"| `{row['objective']}` | `{decoder}`{mark} | {figures} |")
    return "\n".join([*lines, "", r"\* The model was not trained for this decoder."])


def summary(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the README's table: training, decoder, score, tokens per forward."""
    shown = [{**row, "objective": class_name(row["model.objective"])} for row in rows if not row["mismatch"]]
    shown.sort(key=lambda row: ORDER.index(row["objective"]))
    return [
        [
            f"small, `{row['objective']}`", f"`{class_name(row['model.decoders'][row['decoder']])}`",
            f"score: {row['score']:.3f}", f"{row['tokens_per_forward']:.2f}", "",
        ]
        for row in shown
    ]  # fmt: skip


if __name__ == "__main__":
    results = Path(sys.argv[1]) if sys.argv[1:] else RESULTS
    print(table(json.loads(results.read_text(encoding="utf-8"))["rows"]))
