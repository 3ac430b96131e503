"""Tables for the terminal, Markdown, LaTeX and CSV. All formats write the same columns of cells."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refusion_lit.reports.comparison import Comparison
from refusion_lit.reports.intervals import Interval, format_interval
from refusion_lit.reports.results import is_speed_baseline
from refusion_lit.reports.rows import ReportRow
from refusion_lit.utils.rows import format_csv

MISMATCH = "the model was not trained for this decoder"
INTERVALS = "95 % intervals over prompts: Wilson's for scores that are 0 or 1, else the bootstrap's."
FIGURES = (
    ("score", "score", 3),
    ("tokens_per_forward", "tokens/forward", 2),
    ("tokens_per_second", "tokens/s", 0),
    ("num_forwards", "forwards", 0),
    ("num_calls", "calls", 0),
    ("calls_per_batch", "calls/batch", 1),
    ("tokens_per_call", "tokens/call", 2),
    ("positions_per_token", "positions/token", 1),
    ("latency_median", "latency p50 s", 3),
    ("latency_p95", "p95 s", 3),
)
"""A test's figures: name, title and number of digits."""
_SPEEDS = ("tokens_per_second", "calls_per_batch")
_WIDTH_OF_FILES = 1000
Cell = tuple[str, ...]
"""A text, or an estimate with the ends of its interval."""
Column = tuple[str, list[Cell]]
"""A title, and a cell per row."""


def make_cell(value: float | Interval | None, digits: int, *, signed: bool = False) -> Cell:
    """Format a figure; a missing figure is ``--``."""
    value = value if isinstance(value, Interval) else Interval(math.nan if value is None else value)
    return format_interval(value, digits, signed=signed) or ("--",)


def figure_columns(
    figures: Sequence[Mapping[str, Any]], names: Collection[str] | None = None, metrics: Sequence[str] = ()
) -> list[Column]:
    """Return columns of a test's figures.

    Args:
        figures: Figures by name, for every row.
        names: Names of the figures to show; by default all of :data:`FIGURES`.
        metrics: Names of the task's further metrics, which follow the first figure.
    """
    shown = [figure for figure in FIGURES if names is None or figure[0] in names]
    shown[1:1] = [(name, name, 3) for name in metrics]
    return [(title, [make_cell(values.get(name), digits) for values in figures]) for name, title, digits in shown]


def name_columns(comparison: Comparison, escape: Callable[[str], str] = str) -> list[Column]:
    """Return columns of escaped names: decoders, marked if they do not fit the model, and their options."""
    rows = comparison.rows
    columns = [("decoder", [(escape(row.title) + " *" * bool(row.mismatches),) for row in rows])]
    for name, title in comparison.option_names.items():
        columns.append((title, [(escape(row.options.get(name, "--")),) for row in rows]))
    return columns


def speed_columns(rows: Sequence[ReportRow]) -> list[Column]:
    """Return columns of speeds measured in turns: tokens per second of one prompt, and ratios by batch size."""
    columns: list[Column] = []
    for size in sorted({size for row in rows for size in row.latency}, key=int):
        measured = [row.latency.get(size, {}) for row in rows]
        if size == "1":
            columns.append(
                ("tokens/s, alone", [make_cell(figures.get("tokens_per_second"), 0) for figures in measured])
            )
        ratios = [tuple(f"{number:.2f}" for number in figures.get("times_baseline", ())) for figures in measured]
        title = "times, alone" if size == "1" else f"times, batch {size}"
        columns.append((title, [ratio if len({*ratio}) > 1 else (*ratio[:1], "--")[:1] for ratio in ratios]))
    return columns


def comparison_columns(comparison: Comparison, names: Collection[str] = _SPEEDS) -> list[Column]:
    """Return the columns of a comparison's figures, without the columns of names.

    Args:
        comparison: The comparison.
        names: Names of figures that are shown without intervals.
    """
    rows = comparison.rows
    figures = [row.figures for row in rows]
    return [
        ("prompts", [(row.prompts,) for row in rows]),
        ("score %", [make_cell(row.score, 1) for row in rows]),
        *((name, [make_cell(values.get(name), 3) for values in figures]) for name in comparison.metrics),
        ("tokens/forward", [make_cell(row.tokens_per_forward, 2) for row in rows]),
        *speed_columns(rows),
        *figure_columns(figures, names),
        ("batch size", [make_cell(row.results["batch_size"], 0) for row in rows]),
    ]


def latency_note(rows: Sequence[ReportRow]) -> list[str]:
    """Return a sentence that names the decoder to which the speeds are compared; nothing without such speeds."""
    if not any(row.latency for row in rows):
        return []
    names = list(dict.fromkeys(row.title for row in rows if is_speed_baseline(row.latency)))
    baseline = names[0] if len(names) == 1 else "the decoder of the same run at 1.00"
    return [f"times: as fast as {baseline}, measured in turns in one process; 95 % intervals over batches of prompts."]


def print_comparison(title: str, comparison: Comparison) -> None:
    """Print the figures that fit a terminal on standard output; the table's width is limited in a terminal only.

    Speeds that were measured in turns replace the speeds of the test.
    """
    rows, names, speeds = comparison.rows, name_columns(comparison), speed_columns(comparison.rows)
    shown = ("score", "tokens_per_forward", *(() if speeds else _SPEEDS))
    marks = [f"* {MISMATCH}"] * any(row.mismatches for row in rows)
    table = Table(title=title, caption="\n".join([*marks, *latency_note(rows)]) or None)
    columns = [*names, *figure_columns([row.figures for row in rows], shown, comparison.metrics), *speeds]
    for number, (column_title, _) in enumerate(columns):
        table.add_column(column_title, justify="left" if number < len(names) else "right", overflow="fold")
    for line in _lines(columns)[1:]:
        table.add_row(*map(Text, line))
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES).print(table)


def _lines(columns: Sequence[Column]) -> list[list[str]]:
    """Return the texts of a table line by line, the titles first."""
    titles, cells = zip(*columns, strict=True)
    texts = [[f"{c[0]} [{', '.join(c[1:])}]" if c[1:] else c[0] for c in row] for row in zip(*cells, strict=True)]
    return [list(titles), *texts]


def _paper_columns(comparison: Comparison, escape: Callable[[str], str]) -> list[Column]:
    """Return the columns of a table for papers, with differences from the baseline; names are escaped."""
    rows = comparison.rows
    return [
        *name_columns(comparison, escape),
        *comparison_columns(comparison),
        ("Δ score", [make_cell(row.score_difference, 1, signed=True) for row in rows]),
        ("Δ tokens/forward", [make_cell(row.tokens_per_forward_difference, 2, signed=True) for row in rows]),
    ]


def _captions(comparison: Comparison) -> list[str]:
    """Return the sentences below a comparison's table."""
    captions = [INTERVALS, *latency_note(comparison.rows)]
    if comparison.compared:
        captions.append(f"Differences from {comparison.baseline} are over the prompts that both rows have.")
    captions += [
        f"{row.label} and {row.baseline.label} have different prompts or references under {row.num_differing} ids, "
        "which are left out."
        for row in comparison.compared
        if row.num_differing
    ]
    marks = [f"*: {MISMATCH}."] * any(row.mismatches for row in comparison.rows)
    return [*captions, *comparison.notes, *marks]


def markdown_table(comparison: Comparison) -> str:
    """Return a comparison as a Markdown table, with its caption below."""
    table = format_markdown(_paper_columns(comparison, escape_markdown))
    return "\n".join([table, "", " ".join(map(escape_markdown, _captions(comparison))), ""])


def format_markdown(columns: Sequence[Column]) -> str:
    """Return columns as a Markdown table whose first column is left-aligned; titles are escaped, cells are not."""
    lines = _lines([(escape_markdown(title), cells) for title, cells in columns])
    titles, *rows = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([titles, f"|---|{'---:|' * (len(columns) - 1)}", *rows])


def latex_table(comparison: Comparison) -> str:
    """Return a comparison as a LaTeX table with ``booktabs`` rules."""
    columns = [(escape_latex(title), cells) for title, cells in _paper_columns(comparison, escape_latex)]
    minus = r"(?<![\w-])-(?=\d)"
    titles, *rows = (re.sub(minus, "$-$", " & ".join(line)) + r" \\" for line in _lines(columns))
    return "\n".join([
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"\toprule", titles, r"\midrule", *rows, r"\bottomrule",
        r"\end{tabular}",
        *(f"% {' '.join(caption.split())}" for caption in _captions(comparison)),
        "",
    ])  # fmt: skip


def csv_table(comparison: Comparison) -> str:
    """Return a comparison as CSV: numbers with all digits, an interval in three columns."""
    rows = []
    for row in comparison.rows:
        values: dict[str, Any] = {"decoder": row.label, **row.options, **row.figures, "num_prompts": row.num_prompts}
        values["mismatch"] = "; ".join(row.mismatches)
        for name in ("score", "tokens_per_forward", "score_difference", "tokens_per_forward_difference"):
            for suffix, value in zip(("", "_low", "_high"), getattr(row, name), strict=True):
                values[name + suffix] = None if math.isnan(value) else value
        rows.append(values)
    return format_csv(rows)


def escape_markdown(text: str) -> str:
    """Escape the characters that Markdown, or HTML inside it, interprets."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`*_\[\]|#]", r"\\\g<0>", text)


def escape_latex(text: str) -> str:
    r"""Escape the characters that LaTeX interprets.

    >>> escape_latex("slot_size at 90 %")
    'slot\\_size at 90 \\%'
    """
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "Δ": r"$\Delta$"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in " ".join(text.split()))
