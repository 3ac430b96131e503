"""Writes reports: a self-contained HTML page without scripts, plots and tables."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from refusion_lit.reports.comparison import Comparison, compare
from refusion_lit.reports.intervals import NUM_RESAMPLES
from refusion_lit.reports.plots import STYLE, speed_plot, tradeoff_plot, training_plots
from refusion_lit.reports.results import describe_environment
from refusion_lit.reports.rows import ReportRow, ScoredPrediction, read_rows
from refusion_lit.reports.tables import (
    comparison_columns,
    csv_table,
    latency_note,
    latex_table,
    make_cell,
    markdown_table,
    name_columns,
    print_comparison,
)
from refusion_lit.utils.files import require_writable, write_atomically
from refusion_lit.utils.require import require
from refusion_lit.version import __version__

_PLOT = "tradeoff.svg"  # every report has this file
_NUM_EXAMPLES = 4
_MAX_EXAMPLE_ROWS = 8
_NOT_IN_TABLE = ("score", "tokens_per_forward", "num_forwards", "num_calls", "tokens_per_call")
"""Figures without a plain column on the page: two are shown with intervals, three follow from other columns."""


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = None,
    formats: Sequence[str] = ("html",),
    title: str | None = None,
) -> list[Path]:
    """Write a report on runs and sweeps; the plot is always written, as an SVG file.

    Args:
        paths: Run or sweep directories, or ``results.json`` files.
        output: Directory to write to. By default ``report`` inside a single path's directory, and ``report`` in the
            working directory for several paths.
        baseline: Row or decoder with which others are compared; by default the speeds' baseline, or else the first row.
        formats: Names in :data:`FORMATS`: ``html`` is the page, ``markdown``, ``latex`` (``booktabs``) and ``csv`` are
            tables, ``pdf`` and ``png`` are plots.
        title: Title of a table that is printed, too; ``None``: print none.

    Returns:
        The written files in format order, and the SVG plot last.

    Raises:
        ValueError: If a path has no results, the baseline or a format is unknown, or the output directory holds other
            files with these names.
    """
    allowed = f"some of {', '.join(FORMATS)}, or all"
    require(bool(formats) and set(formats) <= set(FORMATS), "format", allowed, ",".join(formats), "choose among these")
    require("" not in (*paths, output), "report", "directories with names", "", "write . for this one")
    comparison = compare(*read_rows(paths), baseline)
    if title is not None:
        print_comparison(title, comparison)
    sys.stderr.writelines(f"note: {note}\n" for note in comparison.notes)
    first = Path(paths[0])
    place = Path() if len(paths) > 1 else first.parent if first.is_file() else first
    directory = place / "report" if output is None else Path(output)
    names = [FORMATS[form][0] for form in formats]
    others = [name for name in [*names, _PLOT] if (directory / name).exists() and not (directory / _PLOT).exists()]
    fix = "choose another directory"
    require(not others, "output", "a report's directory, or one without such files", f"{directory} with {others}", fix)
    require_writable(directory, "output")
    plot = tradeoff_plot(comparison)
    contents = [html_report(comparison, plot) if form == "html" else FORMATS[form][1](comparison) for form in formats]
    files = {**dict(zip(names, contents, strict=True)), _PLOT: plot}
    for name, content in files.items():
        write_atomically(directory / name, content)
    return [directory / name for name in files]


def report_results(path: Path, title: str) -> None:
    """Print the figures of a finished test or sweep and write its report.

    Warns if the report cannot be written, because the results are already on disk.

    Args:
        path: The test's ``results.json``, or the sweep's directory.
        title: Title of the printed table.
    """
    try:
        sys.stderr.write(f"report: {write_report([path], title=title)[0]}\n")
    except (ValueError, OSError) as error:
        warnings.warn(f"the results are written, but their report is not: {error}", stacklevel=2)


def html_report(comparison: Comparison, tradeoff: bytes | None = None) -> str:
    """Return a comparison as a page.

    Args:
        comparison: The comparison.
        tradeoff: The tradeoff plot as an SVG file; drawn if not given.
    """
    rows = comparison.rows
    tests = list({id(row.results): row for row in rows}.values())  # a row of every test
    examples, num_differing = _examples(rows[:_MAX_EXAMPLE_ROWS])
    recorded = {key for row in rows for key, value in row.figures.items() if value is not None}
    environment = Environment(
        loader=PackageLoader("refusion_lit", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["to_yaml"] = lambda values: yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        title=", ".join(dict.fromkeys(row.source for row in rows)),
        speed=Markup(speed_plot(comparison)) if any("1" in row.latency for row in rows) else None,
        tradeoff=Markup((tradeoff or tradeoff_plot(comparison)).decode()),
        columns=[*name_columns(comparison)[1:], *comparison_columns(comparison, recorded - {*_NOT_IN_TABLE})],
        make_cell=make_cell,
        latency_note=" ".join(latency_note(rows)),
        training=list(map(Markup, training_plots(tests))),
        plot_style=STYLE,
        tests=[(test, _facts(test)) for test in tests],
        examples=examples,
        num_differing_examples=num_differing,
        hidden_example_rows=max(len(rows) - _MAX_EXAMPLE_ROWS, 0),
        version=__version__,
        num_resamples=NUM_RESAMPLES,
    )


def _facts(test: ReportRow) -> dict[str, str]:
    """Return the facts about a test by name: options, versions, hardware. Unrecorded facts are left out."""
    environment = test.results["environment"]
    command = environment.get("command")
    facts = {
        "folder": test.run,
        "command": shlex.join(command) if isinstance(command, list) else command,
        "seed": environment.get("seed"),
        "sampling": ", ".join(f"{name}={value}" for name, value in test.results["sampling"].items()),
        "batch size": test.results["batch_size"],
        **describe_environment(environment),
    }
    return {name: str(value) for name, value in facts.items() if value is not None and value != ""}


def _examples(rows: Sequence[ReportRow]) -> tuple[list[list[tuple[ReportRow, ScoredPrediction]]], int]:
    """Return the rows' predictions for a few examples; examples with a wrong answer come first.

    The second value counts ids with different prompts or references.
    """
    pairs = [(row, prediction) for row in rows for prediction in row.predictions.values()]
    answers: dict[tuple[str, str, str | None], list[tuple[ReportRow, ScoredPrediction]]] = {}
    for row, prediction in pairs:
        answers.setdefault(prediction.example, []).append((row, prediction))
    wrong = [prediction.example for _, prediction in pairs if prediction.score < 1]
    first = list(dict.fromkeys([*wrong, *answers]))[:_NUM_EXAMPLES]
    num_differing = sum(number > 1 for number in Counter(identity for identity, *_ in answers).values())
    return [answers[example] for example in first], num_differing


FORMATS: dict[str, tuple[str, Callable[[Comparison], str | bytes]]] = {
    "html": ("report.html", html_report),
    "markdown": ("table.md", markdown_table),
    "latex": ("table.tex", latex_table),
    "csv": ("table.csv", csv_table),
    "pdf": ("tradeoff.pdf", lambda comparison: tradeoff_plot(comparison, "pdf")),
    "png": ("tradeoff.png", lambda comparison: tradeoff_plot(comparison, "png")),
}
"""File name and writer, by format."""
