"""The table and the plot of results.json; `nox -s figures` writes them.

A row is a training, a column a way of decoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

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


def table(results: dict[str, Any]) -> str:
    """Return the scores of each variant as a Markdown table."""
    lines = [
        f"| training | {' | '.join(DECODERS)} | tokens/forward, almost sure |",
        "| --- |" + " --: |" * (len(DECODERS) + 1),
    ]
    for name, figures in results["results"].items():
        scores = [f"{figures[decoder]['score']:.2f}" if decoder in figures else "" for decoder in DECODERS]
        lines.append(f"| {name} | {' | '.join(scores)} | {figures['almost sure']['tokens_per_forward']:.2f} |")
    return "\n".join(lines)


def points(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the scores of each variant by the name of the decoding."""
    return {
        name: {decoder: figures[decoder]["score"] for decoder in DECODERS if decoder in figures}
        for name, figures in results["results"].items()
    }


def draw(scores: dict[str, dict[str, float]], path: Path) -> None:
    """Draw what :func:`points` returns, a row a variant and a colour a decoding."""
    figure, axis = plt.subplots(figsize=(9, 0.42 * len(scores) + 1.2))
    for row, figures in enumerate(scores.values()):
        for decoder, score in figures.items():
            axis.plot(score, row, "o", color=DECODERS[decoder])
    axis.set_yticks(range(len(scores)), list(scores))
    axis.invert_yaxis()
    axis.set_xlim(-0.02, 1.02)
    axis.set_xlabel("share of 200 Latin squares that is completed")
    axis.grid(alpha=0.3)
    for decoder, colour in DECODERS.items():
        axis.plot([], [], "o", color=colour, label=decoder)
    axis.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
