"""Writes reports: a self-contained HTML page without scripts, plots and tables."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from refusion_lit.reports.comparison import Comparison, ComparisonRow, compare
from refusion_lit.reports.intervals import NUM_RESAMPLES
from refusion_lit.reports.plots import STYLE, speed_plot, tradeoff_plot, training_plots
from refusion_lit.reports.results import describe_environment
from refusion_lit.reports.runs import Run, ScoredPrediction, read_runs
from refusion_lit.reports.tables import (
    comparison_table,
    csv_table,
    difference_cell,
    latency_note,
    latex_table,
    markdown_table,
    print_comparison,
)
from refusion_lit.utils.files import require_writable, write_atomically
from refusion_lit.utils.require import require
from refusion_lit.version import __version__

_PLOT = "tradeoff.svg"  # every report has this file
_NUM_EXAMPLES = 4
_MAX_EXAMPLE_ROWS = 8
_NOT_IN_TABLE = ("score", "tokens_per_forward", "num_forwards", "num_calls", "tokens_per_call")
"""Figures without a plain column on the page: two have intervals, and three follow from other columns."""


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = None,
    formats: Sequence[str] = ("html",),
) -> list[Path]:
    """Write a report on runs and sweeps; the plot is always written, as an SVG file.

    Args:
        paths: Run or sweep directories, or ``results.json`` files.
        output: Directory to write to. By default ``report`` inside a single path's directory, and ``report`` in the
            working directory for several paths.
        baseline: Row or decoder that the others are compared with; by default the decoder that speeds were compared
            with, or else the first row.
        formats: Names in :data:`FORMATS`: ``html`` is the page, ``markdown``, ``latex`` (``booktabs``) and ``csv`` are
            tables, ``pdf`` and ``png`` are plots.

    Returns:
        The written files in format order, and the SVG plot last.

    Raises:
        ValueError: If a path has no results, the baseline or a format is unknown, or the output directory holds other
            files with these names.
    """
    allowed = f"some of {', '.join(FORMATS)}, or all"
    require(bool(formats) and set(formats) <= set(FORMATS), "format", allowed, ",".join(formats), "choose among these")
    require("" not in (*paths, output), "report", "directories with names", "", "write . for this one")
    comparison = compare(*read_runs(paths), baseline)
    _print_notes(comparison.notes)
    first = Path(paths[0])
    place = Path() if len(paths) > 1 else first.parent if first.is_file() else first
    return write_comparison(comparison, place / "report" if output is None else Path(output), formats)


def write_comparison(comparison: Comparison, directory: Path, formats: Sequence[str] = ("html",)) -> list[Path]:
    """Write a comparison into a directory; see :func:`write_report`."""
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


def _print_notes(notes: Sequence[str]) -> None:
    sys.stderr.writelines(f"note: {note}\n" for note in notes)


def report_results(path: Path, title: str) -> None:
    """Print the figures of a finished test or sweep and write its report.

    Warns if the report cannot be written, because the results are already on disk.

    Args:
        path: The test's ``results.json``, or the sweep's directory.
        title: Title of the printed table.
    """
    directory = path.parent if path.is_file() else path
    try:
        comparison = compare(*read_runs([path]))
        print_comparison(title, comparison)
        _print_notes(comparison.notes)
        sys.stderr.write(f"report: {write_comparison(comparison, directory / 'report')[0]}\n")
    except (ValueError, OSError) as error:
        warnings.warn(f"the results are written, but their report is not: {error}", stacklevel=2)


def html_report(comparison: Comparison, tradeoff: bytes | None = None) -> str:
    """Return a comparison as a page.

    Args:
        comparison: The comparison.
        tradeoff: The tradeoff plot as an SVG file; drawn if not given.
    """
    runs = comparison.runs
    examples, num_differing = _examples(comparison)
    recorded = {key for row in comparison.rows for key, value in row.figures.items() if value is not None}
    keys = recorded - {*_NOT_IN_TABLE}
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
        title=", ".join(dict.fromkeys(run.source for run in runs)),
        speed=Markup(speed_plot(comparison)) if any("1" in row.latency for row in comparison.rows) else None,
        tradeoff=Markup((tradeoff or tradeoff_plot(comparison)).decode()),
        table=comparison_table(comparison, keys),
        difference_cell=difference_cell,
        latency_note=" ".join(latency_note(comparison.rows)),
        training=list(map(Markup, training_plots(runs))),
        plot_style=STYLE,
        runs=[(run, _facts(run)) for run in runs],
        examples=examples,
        num_differing_examples=num_differing,
        hidden_example_rows=max(len(comparison.rows) - _MAX_EXAMPLE_ROWS, 0),
        version=__version__,
        num_resamples=NUM_RESAMPLES,
    )


def _facts(run: Run) -> dict[str, str]:
    """Return by name how a run was made; facts that were not recorded are left out."""
    environment = run.results["environment"]
    command = environment.get("command")
    facts = {
        "folder": run.name,
        "command": shlex.join(command) if isinstance(command, list) else command,
        "seed": environment.get("seed"),
        "sampling": ", ".join(f"{name}={value}" for name, value in run.results["sampling"].items()),
        "batch size": run.results["batch_size"],
        **describe_environment(environment),
    }
    return {name: str(value) for name, value in facts.items() if value is not None and value != ""}


def _examples(comparison: Comparison) -> tuple[list[tuple[Any, ...]], int]:
    """Return id, prompt, reference and predictions for a few prompts, prompts with a wrong answer first.

    Only the first rows are used. The second value counts ids with different prompts or references there.
    """
    rows = comparison.rows[:_MAX_EXAMPLE_ROWS]
    # Rows with another prompt or reference under the same id are another example.
    answers: dict[tuple[str, tuple[str, str | None]], list[tuple[ComparisonRow, ScoredPrediction]]] = {}
    for row in rows:
        for identity, prediction in row.predictions.items():
            answers.setdefault((identity, prediction.example), []).append((row, prediction))
    wrong = [(i, p.example) for row in rows for i, p in row.predictions.items() if p.score < 1]
    first = list(dict.fromkeys([*wrong, *answers]))[:_NUM_EXAMPLES]
    examples = [(identity, *example, answers[identity, example]) for identity, example in first]
    return examples, sum(number > 1 for number in Counter(identity for identity, _ in answers).values())


FORMATS: dict[str, tuple[str, Callable[[Comparison], str | bytes]]] = {
    "html": ("report.html", html_report),
    "markdown": ("table.md", markdown_table),
    "latex": ("table.tex", latex_table),
    "csv": ("table.csv", csv_table),
    "pdf": ("tradeoff.pdf", lambda comparison: tradeoff_plot(comparison, "pdf")),
    "png": ("tradeoff.png", lambda comparison: tradeoff_plot(comparison, "png")),
}
"""File name and writer, by format."""
