"""The figures of a test that tables show, and tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MISMATCH = "the model was not trained for this decoder"
CONCURRENT = "speeds are left out: points ran concurrently and slowed each other down (launcher.num_workers)"
FIGURES = (
    ("score", "score", "{:.3f}"),
    ("tokens_per_forward", "tokens/forward", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:.0f}"),
    ("num_forwards", "forwards", "{:d}"),
    ("num_calls", "calls", "{:d}"),
    ("calls_per_batch", "calls/batch", "{:.1f}"),
    ("tokens_per_call", "tokens/call", "{:.2f}"),
    ("positions_per_token", "positions/token", "{:.1f}"),
    ("latency_median", "latency p50 s", "{:.3f}"),
    ("latency_p95", "p95 s", "{:.3f}"),
)
"""Name, title and format of each figure of a test."""

_PRINTED_KEYS = ("score", "tokens_per_forward", "tokens_per_second", "calls_per_batch")
PRINTED = tuple(figure for figure in FIGURES if figure[0] in _PRINTED_KEYS)
"""The figures that fit a terminal; reports and result files have all of them."""

_WIDTH_OF_FILES = 1000


def decoder_table(
    results: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    *,
    marked: Set[str] = frozenset(),
    metrics: Sequence[str] = (),
) -> None:
    """Print the figures of a test, one decoder per line.

    Args:
        results: For each decoder the figures of :class:`~refusion_lit.metrics.DecodingMetrics`.
        batch_size: Maximum number of prompts per call of the model.
        marked: Names of the decoders that the model was not trained for.
        metrics: Names of the task's further metrics.
    """
    num_prompts = max((int(figures["num_prompts"]) for figures in results.values()), default=0)
    shown = with_metrics(PRINTED, metrics)
    head = ["decoder", *(title for _, title, _ in shown)]
    rows = [[f"{name} *" if name in marked else name, *cells(figures, shown)] for name, figures in results.items()]
    title = f"{num_prompts} prompts, batch size {batch_size}"
    print_table(title, head, rows, note=f"* {MISMATCH}" if marked else None)


def print_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    num_texts: int = 1,
    note: str | None = None,
) -> None:
    """Print a table on standard output, without a limit of the width if it is no terminal.

    Args:
        title: Line above the table.
        head: Names of the columns.
        rows: Cells of each row.
        num_texts: The first columns hold text, the others numbers.
        note: Line below the table.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    table = Table(title=title, caption=note)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < num_texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def with_metrics(shown: Sequence[tuple[str, str, str]], metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return figures with a task's further metrics after the score, which is the first."""
    return [shown[0], *((name, name, "{:.3f}") for name in metrics), *shown[1:]]


def cells(figures: Mapping[str, Any], shown: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the values of figures as they are shown, ``--`` for one that is missing."""
    return ["--" if figures.get(key) is None else template.format(figures[key]) for key, _, template in shown]


def escaped(text: str) -> str:
    """Escape the characters that Markdown, or HTML inside it, interprets."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text)
