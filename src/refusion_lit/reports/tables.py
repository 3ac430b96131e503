"""Tables in the terminal, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
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
_SPEEDS = ("tokens_per_second", "calls_per_batch")
"""Figures that speeds measured in turns replace in a terminal."""
_WIDTH_OF_FILES = 1000
Latency = Mapping[str, Mapping[str, Any]]
"""A decoder's speeds measured in turns, by batch size."""
Cell = tuple[str, ...]
"""A text, or an estimate with the ends of its interval."""


def print_comparison(title: str, comparison: Comparison) -> None:
    """Print the figures that fit a terminal on standard output; the table's width is limited in a terminal only.

    Speeds that were measured in turns replace the speeds of the test.
    """
    rows, sizes = comparison.rows, _latency_sizes(comparison.rows)
    keys = ("score", "tokens_per_forward", *(() if sizes else _SPEEDS))
    columns = with_metrics([figure for figure in FIGURES if figure[0] in keys], comparison.metrics)
    marks = [f"* {MISMATCH}"] * any(row.mismatches for row in rows)
    table = Table(title=title, caption="\n".join([*marks, *latency_note(rows)]) or None)
    for name in ("decoder", *comparison.option_names.values()):
        table.add_column(name, overflow="fold")
    for name in (*(column_title for _, column_title, _ in columns), *_latency_head(sizes)):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        texts = [_marked_title(row), *(row.options.get(name, "--") for name in comparison.option_names)]
        speeds = map(_as_text, _latency_cells(row.latency, sizes))
        table.add_row(*map(Text, [*texts, *cells(row.figures, columns), *speeds]))
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES).print(table)


def _marked_title(row: ComparisonRow) -> str:
    """Return a row's title, with a mark if the model was not trained for the decoder."""
    return row.title + " *" * bool(row.mismatches)


def _latency_sizes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the batch sizes of the rows' speeds, ascending."""
    return sorted({size for row in rows for size in row.latency}, key=int)


def _latency_head(sizes: Sequence[str]) -> list[str]:
    """Return column names: tokens per second one prompt at a time, and the ratios to the baseline by batch size."""
    titles = ["times, alone" if size == "1" else f"times, batch {size}" for size in sizes]
    return ["tokens/s, alone", *titles] if "1" in sizes else titles


def _latency_cells(entry: Latency, sizes: Sequence[str]) -> list[Cell]:
    """Return the cells of a decoder for :func:`_latency_head`; ``--`` where nothing was measured."""
    cells: list[Cell] = [("--" if "1" not in entry else f"{entry['1']['tokens_per_second']:.0f}",)] * ("1" in sizes)
    for size in sizes:
        ratio = [f"{number:.2f}" for number in entry[size]["times_baseline"]] if size in entry else ["--"]
        cells.append(tuple(ratio if len({*ratio}) > 1 else ratio[:1]))
    return cells


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


def comparison_table(comparison: Comparison, keys: Collection[str] = _SPEEDS) -> tuple[list[str], list[list[Cell]]]:
    """Return the head and the cells of a comparison's table; the first cells of a row are the decoder and its options.

    Args:
        comparison: The comparison.
        keys: Names of figures that are shown without intervals.
    """
    metrics = metric_columns(comparison.metrics)
    others = [figure for figure in FIGURES if figure[0] in keys]
    sizes = _latency_sizes(comparison.rows)
    head = ["decoder", *comparison.option_names.values(), "prompts", "score %", *comparison.metrics, "tokens/forward"]
    head += [*_latency_head(sizes), *(title for _, title, _ in others), "batch size"]
    rows = []
    for row in comparison.rows:
        size = row.run.results["batch_size"]
        texts = [row.title, *(row.options.get(name, "--") for name in comparison.option_names)]
        rows.append([
            *((text,) for text in (*texts, comparison.count_prompts(row))),
            format_interval(row.score, 1)[: None if row.has_intervals else 1],
            *((text,) for text in cells(row.figures, metrics)),
            format_interval(row.tokens_per_forward, 2)[: None if row.has_intervals else 1],
            *_latency_cells(row.latency, sizes),
            *((text,) for text in cells(row.figures, others)),
            ("--" if size is None else f"{size:.0f}",),
        ])  # fmt: skip
    return head, rows


def difference_cell(value: Interval | None, digits: int) -> Cell:
    """Return the cell of a difference from the baseline."""
    return ("--",) if value is None else format_interval(value, digits, signed=True)


def _as_text(cell: Cell) -> str:
    estimate, *ends = cell
    return f"{estimate} [{', '.join(ends)}]" if ends else estimate


def _text_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a comparison's table as texts, with differences from the baseline."""
    head, rows = comparison_table(comparison)
    texts = []
    for row, line in zip(comparison.rows, rows, strict=True):
        difference = comparison.find_difference(row)
        line += [difference_cell(difference and difference.score, 1)]
        line += [difference_cell(difference and difference.tokens_per_forward, 2)]
        texts.append([_marked_title(row), *map(_as_text, line[1:])])
    return [*head, "Δ score", "Δ tokens/forward"], texts


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
    head, rows = _text_table(comparison)
    num_texts = 1 + len(comparison.option_names)
    lines = [[*map(escape_markdown, row[:num_texts]), *row[num_texts:]] for row in rows]
    for line in lines:
        line[0] = re.sub(r" \\\*$", " *", line[0])  # the mark of a mismatch, which is no emphasis there
    table = [f"| {' | '.join(line)} |" for line in [[*map(escape_markdown, head)], *lines]]
    table.insert(1, f"|---|{'---:|' * (len(head) - 1)}")
    return "\n".join([*table, "", " ".join(map(escape_markdown, _captions(comparison))), ""])


def latex_table(comparison: Comparison) -> str:
    """Return a comparison as a LaTeX table with ``booktabs`` rules."""
    head, rows = _text_table(comparison)
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
