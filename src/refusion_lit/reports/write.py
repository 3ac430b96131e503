"""Writes reports: the self-contained HTML page without scripts, the plot and a Markdown table."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from refusion_lit.reports.comparison import NUM_RESAMPLES, Comparison, ComparisonRow, compare
from refusion_lit.reports.plots import STYLE, standalone, tradeoff_plot, training_plots
from refusion_lit.reports.results import described_environment
from refusion_lit.reports.runs import Run, ScoredPrediction, read_runs
from refusion_lit.reports.tables import MISMATCH, escaped
from refusion_lit.utils.files import write_atomically
from refusion_lit.utils.require import require
from refusion_lit.version import __version__

FORMATS = ("html", "markdown")
_PLOT = "tradeoff.svg"  # which every report has
_NUM_EXAMPLES = 4
_MAX_EXAMPLE_ROWS = 8


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = None,
    formats: Sequence[str] = ("html",),
) -> list[Path]:
    """Write a report on runs and sweeps; the plot is always written, as an SVG file.

    Args:
        paths: Directories of runs or sweeps, or ``results.json`` files.
        output: Directory to write to. By default ``report`` inside the directory of a single path, and ``report``
            in the working directory for several paths.
        baseline: Row or decoder that the others are compared with; the first row by default.
        formats: ``html`` (``report.html``), ``markdown`` (``table.md``) or both.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: If a path has no results, the baseline or a format is unknown, or the output directory holds other
            files of these names.
    """
    allowed = f"some of {', '.join(FORMATS)}"
    require(bool(formats) and set(formats) <= set(FORMATS), "format", allowed, ",".join(formats), "choose among these")
    require("" not in (*paths, output), "report", "directories with names", "", "write . for this one")
    comparison = compare(*read_runs(paths), baseline)
    first = Path(paths[0])
    place = Path() if len(paths) > 1 else first.parent if first.is_file() else first
    return write_comparison(comparison, place / "report" if output is None else Path(output), formats)


def write_comparison(comparison: Comparison, directory: Path, formats: Sequence[str] = ("html",)) -> list[Path]:
    """Write a comparison into a directory; see :func:`write_report`."""
    sys.stderr.writelines(f"note: {note}\n" for note in comparison.notes)
    plot = tradeoff_plot(comparison)
    files: dict[str, str] = {}
    if "html" in formats:
        files["report.html"] = html_report(comparison, plot)
    if "markdown" in formats:
        files["table.md"] = markdown_table(comparison)
    files[_PLOT] = standalone(plot)
    others = [name for name in files if (directory / name).exists() and not (directory / _PLOT).exists()]
    fix = "choose another directory"
    require(not others, "output", "a report's directory, or one without such files", f"{directory} with {others}", fix)
    is_folder = next(path for path in (directory, *directory.absolute().parents) if path.exists()).is_dir()
    require(is_folder, "output", "a directory", str(directory), "choose another name, as this one leads to a file")
    for name, content in files.items():
        write_atomically(directory / name, content)
    return [directory / name for name in files]


def report_results(directory: Path, run: Run | None = None) -> None:
    """Write the report of a finished test or sweep; warn if that fails, because its results are already on disk.

    Args:
        directory: Directory of the test or sweep.
        run: The finished test; by default the directory is read.
    """
    try:
        comparison = compare([run], []) if run else compare(*read_runs([directory]))
        sys.stderr.write(f"report: {write_comparison(comparison, directory / 'report')[0]}\n")
    except (ValueError, OSError) as error:
        warnings.warn(f"the results are written, but their report is not: {error}", stacklevel=2)


def html_report(comparison: Comparison, plot: str) -> str:
    """Render the report.

    Args:
        comparison: The rows and differences to show.
        plot: The trade-off plot, an SVG element.
    """
    runs = comparison.runs
    examples, num_differing = _examples(comparison)
    return _template("report.html.jinja").render(
        comparison=comparison,
        title=", ".join(dict.fromkeys(run.source for run in runs)),
        tradeoff=Markup(plot),
        training=list(map(Markup, training_plots(runs))),
        plot_style=STYLE,
        runs=[(run, _facts(run)) for run in runs],
        examples=examples,
        num_differing_examples=num_differing,
        hidden_example_rows=max(len(comparison.rows) - _MAX_EXAMPLE_ROWS, 0),
        version=__version__,
        num_resamples=NUM_RESAMPLES,
    )


def markdown_table(comparison: Comparison) -> str:
    """Return a comparison as a Markdown table, with its caption below."""
    return _template("table.md.jinja").render(comparison=comparison, mismatch=MISMATCH)


def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("refusion_lit", "reports"),
        autoescape=name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["escaped"] = escaped
    environment.filters["to_yaml"] = lambda values: yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return environment.get_template(name)


def _facts(run: Run) -> dict[str, str]:
    """Return how a run was made, by name, without what was not recorded."""
    environment = run.results["environment"]
    command = environment.get("command")
    facts = {
        "folder": run.name,
        "command": shlex.join(command) if isinstance(command, list) else command,
        "seed": environment.get("seed"),
        "sampling": ", ".join(f"{name}={value}" for name, value in run.results["sampling"].items()),
        "batch size": run.results["batch_size"],
        **described_environment(environment),
    }
    return {name: str(value) for name, value in facts.items() if value is not None and value != ""}


def _examples(comparison: Comparison) -> tuple[list[tuple[Any, ...]], int]:
    """Return id, prompt, reference and predictions of the first rows of a few prompts, those with a wrong one first.

    Beside them, the number of ids that have different prompts or references in these rows.
    """
    rows = comparison.rows[:_MAX_EXAMPLE_ROWS]
    # Rows with another prompt or reference under the same id are another example.
    answers: dict[tuple[str, tuple[str, str | None]], list[tuple[ComparisonRow, ScoredPrediction]]] = {}
    for row in rows:
        for identity, prediction in row.predictions.items():
            answers.setdefault((identity, prediction.example), []).append((row, prediction))
    wrong = [(i, p.example) for row in rows for i, p in row.predictions.items() if p.score < 1]
    first = list(dict.fromkeys([*wrong, *answers]))[:_NUM_EXAMPLES]
    shown = [(identity, *example, answers[identity, example]) for identity, example in first]
    return shown, sum(number > 1 for number in Counter(identity for identity, _ in answers).values())
