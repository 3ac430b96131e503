"""Tables in the terminal, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refusion_lit.reports.comparison import Comparison, ComparisonRow
from refusion_lit.reports.intervals import Interval, format_interval
from refusion_lit.reports.results import is_speed_baseline
from refusion_lit.utils.rows import format_csv

MISMATCH = "the model was not trained for this decoder"
INTERVALS = "95 % intervals over prompts: Wilson's for scores that are 0 or 1, else the bootstrap's."
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
"""A test's figures: name, title and format."""

_PRINTED_KEYS = ("score", "tokens_per_forward", "tokens_per_second", "calls_per_batch")
PRINTED = tuple(figure for figure in FIGURES if figure[0] in _PRINTED_KEYS)
"""The figures that fit a terminal; reports have more, and result files have all figures."""

_WIDTH_OF_FILES = 1000
Latency = Mapping[str, Mapping[str, Any]]
"""A decoder's speeds measured in turns, by batch size."""


def print_comparison(title: str, comparison: Comparison) -> None:
    """Print the figures that fit a terminal on standard output; the table's width is limited in a terminal only.

    Speeds that were measured in turns replace the speeds of the test.
    """
    rows, sizes = comparison.rows, latency_sizes(comparison.rows)
    replaced = ("tokens_per_second", "calls_per_batch") if sizes else ()
    columns = with_metrics([column for column in PRINTED if column[0] not in replaced], comparison.metrics)
    marks = [f"* {MISMATCH}"] * any(row.mismatches for row in rows)
    table = Table(title=title, caption="\n".join([*marks, *latency_note(rows)]) or None)
    for name in ("decoder", *comparison.option_names.values()):
        table.add_column(name, overflow="fold")
    for name in (*(column_title for _, column_title, _ in columns), *latency_head(sizes)):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        texts = [_marked_title(row), *(row.options.get(name, "--") for name in comparison.option_names)]
        table.add_row(*map(Text, [*texts, *cells(row.figures, columns), *latency_texts(row.latency, sizes)]))
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES).print(table)


def _marked_title(row: ComparisonRow) -> str:
    """Return a row's title, with a mark if the model was not trained for the decoder."""
    return row.title + " *" * bool(row.mismatches)


def latency_sizes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the batch sizes of the rows' speeds, ascending."""
    return sorted({size for row in rows for size in row.latency}, key=int)


def latency_head(sizes: Sequence[str]) -> list[str]:
    """Return column names: tokens per second one prompt at a time, and the ratios to the baseline by batch size."""
    titles = ["times, alone" if size == "1" else f"times, batch {size}" for size in sizes]
    return ["tokens/s, alone", *titles] if "1" in sizes else titles


def latency_cells(entry: Latency, sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the cells of a decoder for :func:`latency_head`: estimate and range, which is empty without an interval.

    The estimate is ``--`` where nothing was measured.
    """
    cells = [("--" if "1" not in entry else f"{entry['1']['tokens_per_second']:.0f}", "")] * ("1" in sizes)
    for size in sizes:
        estimate, low, high = entry[size]["times_baseline"] if size in entry else (None, None, None)
        text = "--" if estimate is None else f"{estimate:.2f}"
        cells.append((text, "" if low == high else f"{low:.2f} to {high:.2f}"))
    return cells


def latency_texts(entry: Latency, sizes: Sequence[str]) -> list[str]:
    """Return :func:`latency_cells` with the range in brackets behind the estimate."""
    return [f"{estimate} ({interval})" if interval else estimate for estimate, interval in latency_cells(entry, sizes)]


def latency_note(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return a sentence that names the decoder to which the speeds are compared; nothing without such speeds."""
    if not any(row.latency for row in rows):
        return []
    names = list(dict.fromkeys(row.title for row in rows if is_speed_baseline(row.latency)))
    baseline = names[0] if len(names) == 1 else "the decoder of the same run at 1.00"
    return [f"times: as fast as {baseline}, measured in turns in one process; 95 % intervals over batches of prompts."]


def metric_columns(metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return a task's further metrics as columns: name, title and format."""
    return [(name, name, "{:.3f}") for name in metrics]


def with_metrics(columns: Sequence[tuple[str, str, str]], metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Insert a task's further metrics after the score, which is the first figure."""
    return [columns[0], *metric_columns(metrics), *columns[1:]]


def cells(figures: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    """Format figures; a missing figure is ``--``."""
    return ["--" if figures.get(key) is None else template.format(figures[key]) for key, _, template in columns]


def comparison_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return a comparison's table as texts: its head, and rows with intervals and differences from the baseline."""
    metrics = metric_columns(comparison.metrics)
    speeds = [figure for figure in FIGURES if figure[0] in ("tokens_per_second", "calls_per_batch")]
    head = ["decoder", *comparison.option_names.values(), "prompts", "score %", *(title for _, title, _ in metrics)]
    sizes = latency_sizes(comparison.rows)
    head += ["tokens/forward", *latency_head(sizes), *(title for _, title, _ in speeds), "batch size"]
    head += ["Δ score", "Δ tokens/forward"]
    rows = []
    for row in comparison.rows:
        difference = comparison.find_difference(row)
        size = row.run.results["batch_size"]
        rows.append([
            _marked_title(row),
            *(row.options.get(name, "--") for name in comparison.option_names),
            comparison.count_prompts(row),
            _interval(row.score, 1, row),
            *cells(row.figures, metrics),
            _interval(row.tokens_per_forward, 2, row),
            *latency_texts(row.latency, sizes),
            *cells(row.figures, speeds),
            "--" if size is None else f"{size:.0f}",
            _interval(difference and difference.score, 1),
            _interval(difference and difference.tokens_per_forward, 2),
        ])  # fmt: skip
    return head, rows


def _interval(value: Interval | None, digits: int, row: ComparisonRow | None = None) -> str:
    """Format a row's interval, or a difference; a row without predictions has the estimate alone."""
    if value is None:
        return "--"
    estimate, low, high = format_interval(value, digits, signed=row is None)
    return f"{estimate} [{low}, {high}]" if row is None or row.has_intervals else estimate


def _captions(comparison: Comparison) -> list[str]:
    """Return the sentences below a comparison's table."""
    captions = [INTERVALS, *latency_note(comparison.rows)]
    if comparison.differences:
        captions.append(f"Differences from {comparison.baseline} are over the prompts that both rows have.")
    captions += [
        f"{difference.row.label} and {difference.baseline.label} have different prompts or references under "
        f"{difference.num_differing} ids, which are left out."
        for difference in comparison.differences
        if difference.num_differing
    ]
    marks = [f"*: {MISMATCH}."] * any(row.mismatches for row in comparison.rows)
    return [*captions, *comparison.notes, *marks]


def markdown_table(comparison: Comparison) -> str:
    """Return a comparison as a Markdown table, with its caption below."""
    head, rows = comparison_table(comparison)
    num_texts = 1 + len(comparison.option_names)
    lines = [[*map(escape_markdown, row[:num_texts]), *row[num_texts:]] for row in rows]
    for line in lines:
        line[0] = re.sub(r" \\\*$", " *", line[0])  # the mark of a mismatch, which is no emphasis there
    table = [f"| {' | '.join(line)} |" for line in [[*map(escape_markdown, head)], *lines]]
    table.insert(1, f"|---|{'---:|' * (len(head) - 1)}")
    return "\n".join([*table, "", " ".join(map(escape_markdown, _captions(comparison))), ""])


def latex_table(comparison: Comparison) -> str:
    """Return a comparison as a LaTeX table with ``booktabs`` rules."""
    head, rows = comparison_table(comparison)
    num_texts = 1 + len(comparison.option_names)
    rows = [
        [*row[:num_texts], *(re.sub(r"-(?=\d)", "\N{MINUS SIGN}", cell) for cell in row[num_texts:])] for row in rows
    ]
    lines = [" & ".join(map(escape_latex, row)) + r" \\" for row in [head, *rows]]
    return "\n".join([
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule",
        r"\end{tabular}",
        *(f"% {' '.join(caption.split())}" for caption in _captions(comparison)),
        "",
    ])  # fmt: skip


def csv_table(comparison: Comparison) -> str:
    """Return a comparison as CSV: numbers with all digits, an interval in three columns."""
    rows = []
    for row in comparison.rows:
        difference = comparison.find_difference(row)
        intervals = {
            "score": row.score,
            "tokens_per_forward": row.tokens_per_forward,
            "score_difference": difference and difference.score,
            "tokens_per_forward_difference": difference and difference.tokens_per_forward,
        }
        values: dict[str, Any] = {"decoder": row.label, **row.options, **row.figures, "num_prompts": row.num_prompts}
        values["mismatch"] = "; ".join(row.mismatches)
        for name, interval in intervals.items():
            for suffix, key in (("", "estimate"), ("_low", "low"), ("_high", "high")):
                values[name + suffix] = interval and getattr(interval, key)
        rows.append(values)
    return format_csv(rows)


def escape_markdown(text: str) -> str:
    """Escape the characters that Markdown, or HTML inside it, interprets."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text)


def escape_latex(text: str) -> str:
    r"""Escape the characters that LaTeX interprets.

    >>> escape_latex("slot_size at 90 %")
    'slot\\_size at 90 \\%'
    """
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"Δ": r"$\Delta$", "\N{MINUS SIGN}": "$-$"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in " ".join(text.split()))
