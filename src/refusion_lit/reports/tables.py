"""Tables: the figures of one test (terminal, Markdown) and a comparison with intervals (Markdown, LaTeX)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from rich.console import Console
from rich.table import Table

from refusion_lit.reports.comparison import Comparison, MeasuredRow
from refusion_lit.reports.intervals import Interval

MISMATCH = "the model was not trained for this decoder"
_FIGURES = (
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
_COMPARED = (
    "decoder",
    "score %",
    "tokens/forward",
    "tokens/s",
    "calls/batch",
    "batch size",
    "Δ score",
    "Δ tokens/forward",
)
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def decoder_table(
    results: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    *,
    marked: Set[str] = frozenset(),
    console: Console | None = None,
) -> None:
    """Print the figures of a test, one decoder per line.

    Args:
        results: For each decoder the figures of :class:`~refusion_lit.metrics.DecodingMetrics`.
        batch_size: Maximum number of prompts per call of the model.
        marked: Names of the decoders that the model was not trained for.
        console: Where to print; standard output by default.
    """
    num_prompts = max((int(figures["num_prompts"]) for figures in results.values()), default=0)
    caption = f"* {MISMATCH}" if marked else None
    table = Table(title=f"{num_prompts} prompts, batch size {batch_size}", caption=caption)
    table.add_column("decoder")
    for _, title, _ in _FIGURES:
        table.add_column(title, justify="right")
    for name, figures in results.items():
        table.add_row(f"{name} *" if name in marked else name, *_cells(figures))
    (console or Console(width=150)).print(table)


def markdown_figures(results: Mapping[str, Mapping[str, Any]], *, marked: Set[str] = frozenset()) -> str:
    """Return the figures of a test as a Markdown table; arguments as for :func:`decoder_table`."""
    titles = ["decoder", *(title for _, title, _ in _FIGURES)]
    lines = [f"| {' | '.join(titles)} |", f"| --- |{' --: |' * len(_FIGURES)}"]
    for name, figures in results.items():
        mark = r" \*" if name in marked else ""
        lines.append(f"| `{name}`{mark} | {' | '.join(_cells(figures))} |")
    if marked:
        lines += ["", rf"\* {MISMATCH}"]
    return "\n".join(lines)


def markdown_table(comparison: Comparison) -> str:
    """Return a comparison as a Markdown table, with its caption below."""
    lines = [f"| {' | '.join(_COMPARED)} |", f"|---|{'---:|' * (len(_COMPARED) - 1)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in _rows(comparison, _escape_markdown, " *", "{} [{}, {}]")]
    return "\n".join([*lines, "", _caption(comparison, _escape_markdown, r"\*"), ""])


def latex_table(comparison: Comparison) -> str:
    """Return a comparison as a LaTeX table environment that uses the package booktabs."""
    header = " & ".join(_escape_latex(name).replace("Δ", r"$\Delta$") for name in _COMPARED)
    rows = _rows(comparison, _escape_latex, r"$^{*}$", r"${}_{{[{},\,{}]}}$")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_caption(comparison, _escape_latex, '$^{*}$')}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(_COMPARED) - 1)}}}",
            r"\toprule",
            rf"{header} \\",
            r"\midrule",
            *(f"{' & '.join(cells)} \\\\" for cells in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _cells(figures: Mapping[str, Any]) -> list[str]:
    return [template.format(figures[key]) for key, _, template in _FIGURES]


def _rows(comparison: Comparison, escape: Callable[[str], str], mark: str, template: str) -> list[Sequence[str]]:
    differences = {id(d.row): d for d in comparison.differences}
    rows = []
    for m in comparison.measured:
        figures, difference = m.row.figures, differences.get(id(m.row))
        rows.append(
            (
                escape(m.row.label) + (mark if m.row.mismatches else ""),
                _estimate(m, m.score, ".1f", template),
                _estimate(m, m.tokens_per_forward, ".2f", template),
                _number(figures.get("tokens_per_second"), ".0f"),
                _number(figures.get("calls_per_batch"), ".1f"),
                _number(m.row.run.batch_size, "d"),
                _interval(difference.score, "+.1f", template) if difference else "--",
                _interval(difference.tokens_per_forward, "+.2f", template) if difference else "--",
            )
        )
    return rows


def _estimate(measured: MeasuredRow, value: Interval, spec: str, template: str) -> str:
    return _interval(value, spec, template) if measured.has_intervals else format(value.estimate, spec)


def _interval(value: Interval | None, spec: str, template: str) -> str:
    if value is None:
        return "--"
    return template.format(*(format(number, spec) for number in (value.estimate, value.low, value.high)))


def _number(value: float | None, spec: str) -> str:
    return "--" if value is None else format(value, spec)


def _caption(comparison: Comparison, escape: Callable[[str], str], mark: str) -> str:
    level = f"{100 * comparison.bootstrap.level:g}"
    text = f"{level} % bootstrap intervals over prompts. Differences from {comparison.baseline} are paired by prompt."
    uneven = sum(1 for d in comparison.differences if d.num_only_row or d.num_only_baseline)
    if uneven:
        total = len(comparison.differences)
        text += f" In {uneven} of {total} differences the rows have different prompts; these use the shared ones only."
    marked = f" {mark}: {MISMATCH}." if any(m.row.mismatches for m in comparison.measured) else ""
    return escape(text) + marked


def _escape_markdown(text: str) -> str:
    """Escape the characters that Markdown, or HTML inside it, interprets."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text)


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))
