"""Draws results.json: the scores of each variant; and writes them to table.md.

usage: python experiments/latin_study/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
DECODERS = {
    "one at a time": "#00796b",
    "almost sure": "#ca8a04",
    "certain": "#c2410c",
    "left to right": "#1d4ed8",
    "random order": "#a3a3a3",
    "slots of 2": "#d8b4fe",
    "slots of 4": "#a855f7",
    "slots of 8": "#6b21a8",
}


def main() -> None:
    """Write scores.png and table.md."""
    results = json.loads((HERE / "results.json").read_text())["results"]
    names = list(results)
    lines = [
        f"| training | {' | '.join(DECODERS)} | tokens/forward, almost sure |",
        "| --- |" + " --: |" * (len(DECODERS) + 1),
    ]
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(names) + 1.2))
    for row, name in enumerate(names):
        found = results[name]
        scores = [f"{found[decoder]['score']:.2f}" if decoder in found else "" for decoder in DECODERS]
        lines.append(f"| {name} | {' | '.join(scores)} | {found['almost sure']['tokens_per_forward']:.2f} |")
        for decoder, colour in DECODERS.items():
            if decoder in found:
                axis.plot(found[decoder]["score"], row, "o", color=colour)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlim(-0.02, 1.02)
    axis.set_xlabel("share of 200 Latin squares that is completed")
    axis.grid(alpha=0.3)
    for decoder, colour in DECODERS.items():
        axis.plot([], [], "o", color=colour, label=decoder)
    axis.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "scores.png", dpi=110)
    (HERE / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
