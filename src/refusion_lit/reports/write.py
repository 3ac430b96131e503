"""Writes reports: the HTML page, the plots and a Markdown table."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refusion_lit.reports.comparison import Comparison, compare
from refusion_lit.reports.intervals import Bootstrap
from refusion_lit.reports.plots import heat_map, standalone, tradeoff_plot
from refusion_lit.reports.runs import ScoredPrediction, read_runs, run_of
from refusion_lit.reports.tables import markdown_table
from refusion_lit.utils.files import write_atomically
from refusion_lit.utils.require import require

FORMATS = ("html", "markdown")
DIRECTORY = "report"
"""Name of the report's directory inside that of a run or a sweep."""

_PLOT = "tradeoff.svg"  # which every report has


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = None,
    formats: Sequence[str] = ("html",),
    bootstrap: Bootstrap | None = None,
) -> list[Path]:
    """Write a report on runs and sweeps; the plots are always written, as SVG files.

    Args:
        paths: Directories of runs or sweeps, or ``results.json`` files.
        output: Directory to write to. By default ``report`` inside the directory of a single path, and ``report``
            in the working directory for several paths.
        baseline: Row or decoder that the others are compared with; the first row by default.
        formats: ``html`` (``report.html``), ``markdown`` (``table.md``) or both.
        bootstrap: Settings of the intervals.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: If a path has no results, the baseline or a format is unknown, or the output directory holds other
            files of these names.
    """
    allowed = f"some of {', '.join(FORMATS)}"
    require(bool(formats) and set(formats) <= set(FORMATS), "format", allowed, ",".join(formats), "choose among these")
    comparison = compare(read_runs(paths), baseline, bootstrap)
    directory = Path(output) if output is not None else _default_output(paths)
    return _write(comparison, directory, formats)


def _write(comparison: Comparison, directory: Path, formats: Sequence[str]) -> list[Path]:
    """Write a comparison; see :func:`write_report`."""
    from refusion_lit.reports.html_report import html_report  # jinja2 takes a moment to import

    plots = {_PLOT: tradeoff_plot(comparison)}
    for number, grid in enumerate(comparison.grids):
        plots[f"heat_map_{number}_{grid.figure}.svg"] = heat_map(grid)
    files: dict[str, str] = {}
    if "html" in formats:
        files["report.html"] = html_report(comparison, plots)
    if "markdown" in formats:
        files["table.md"] = markdown_table(comparison)
    files.update({name: standalone(picture) for name, picture in plots.items()})
    others = [name for name in files if (directory / name).exists() and not (directory / _PLOT).exists()]
    fix = "choose another directory"
    require(not others, "output", "a report's directory, or one without such files", f"{directory} with {others}", fix)
    for name, content in files.items():
        write_atomically(directory / name, content)
    return [directory / name for name in files]


def write_test_report(
    directory: Path, results: dict[str, Any], predictions: dict[str, dict[str, ScoredPrediction]] | None
) -> None:
    """Write the report of one test next to its ``results.json``; warn instead of raising if that fails.

    The results are already on disk, so a failed report must not fail the test.

    Args:
        directory: The run's directory.
        results: What ``results.json`` holds.
        predictions: Predictions by prompt id for each decoder; ``None``: read their files.
    """
    from lightning.pytorch.utilities import rank_zero_info  # takes seconds; `refusion-lit report` does not need it

    try:
        comparison = compare(run_of(directory, results, predictions))
        page = _write(comparison, directory / DIRECTORY, ("html",))[0]
    except (ValueError, OSError) as error:
        warnings.warn(f"the results are written, but their report is not: {error}", stacklevel=2)
    else:
        rank_zero_info(f"report: {page}")


def _default_output(paths: Sequence[str | Path]) -> Path:
    if len(paths) > 1:
        return Path(DIRECTORY)
    path = Path(paths[0])
    return (path.parent if path.is_file() else path) / DIRECTORY
