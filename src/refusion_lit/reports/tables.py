"""Tables of decoders for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from rich.console import Console
from rich.table import Table

_COLUMNS = (
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


def decoder_table(
    results: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    *,
    marked: Set[str] = frozenset(),
    console: Console | None = None,
) -> None:
    """Print decoders side by side.

    Args:
        results: For each decoder's name the figures of :class:`~refusion_lit.metrics.DecodingMetrics`.
        batch_size: Prompts that shared a forward at most.
        marked: Decoders that the model was not trained for.
        console: Where to print; the standard output by default.
    """
    num_prompts = max((int(figures["num_prompts"]) for figures in results.values()), default=0)
    table = Table(title=f"{num_prompts} prompts, batch size {batch_size}", caption=_caption(marked))
    table.add_column("decoder")
    for _, title, _ in _COLUMNS:
        table.add_column(title, justify="right")
    for name, figures in results.items():
        cells = [form.format(figures[key]) for key, _, form in _COLUMNS]
        table.add_row(f"{name} *" if name in marked else name, *cells)
    (console or Console(width=150)).print(table)


def _caption(marked: Set[str]) -> str | None:
    return "* the model was not trained for this decoder" if marked else None


def markdown_table(results: Mapping[str, Mapping[str, Any]], *, marked: Set[str] = frozenset()) -> str:
    """Return decoders side by side as a Markdown table; arguments as for :func:`decoder_table`."""
    titles = ["decoder", *(title for _, title, _ in _COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' --: |' * len(_COLUMNS)}"]
    for name, figures in results.items():
        cells = [form.format(figures[key]) for key, _, form in _COLUMNS]
        mark = r" \*" if name in marked else ""
        lines.append(f"| `{name}`{mark} | {' | '.join(cells)} |")
    if marked:
        lines += ["", f"\\{_caption(marked)}"]
    return "\n".join(lines)
