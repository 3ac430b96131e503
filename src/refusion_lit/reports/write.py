"""Writes a report: HTML page, plots, tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from refusion_lit.reports.comparison import compare
from refusion_lit.reports.intervals import Resampling
from refusion_lit.reports.papers import latex_table, markdown_table
from refusion_lit.reports.runs import read_runs

FORMATS = ("html", "markdown", "latex")
DIRECTORY = "report"
"""Folder of the report inside a run or a sweep."""


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    baseline: str | None = None,
    formats: Sequence[str] = ("html",),
    resampling: Resampling | None = None,
) -> list[Path]:
    """Write a report on runs and sweeps; plots always come with it.

    Args:
        paths: Folders of runs or sweeps, or files ``results.json``.
        output: Where to write; by default ``report`` inside the only folder, or in the working directory if there
            are several.
        baseline: What the others are compared with: a row or a decoder; the first row by default.
        formats: Of ``html`` (``report.html``), ``markdown`` (``table.md``) and ``latex`` (``table.tex``).
        resampling: How intervals are taken.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: If a folder holds no results, or baseline or format is unknown.
    """
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown or not formats:
        raise ValueError(f"format: expected some of {', '.join(FORMATS)}; got {', '.join(unknown) or 'none'}.")
    comparison = compare(read_runs(paths), baseline, resampling)
    # Matplotlib costs a second; whoever only prints a table of a test does not pay it.
    from refusion_lit.reports.page import html_page
    from refusion_lit.reports.plots import heat_map, tradeoff_plot

    plots = {"tradeoff.png": tradeoff_plot(comparison)}
    for number, grid in enumerate(comparison.grids):
        plots[f"heat_map_{number}_{grid.figure}.png"] = heat_map(grid)
    files: dict[str, str | bytes] = {}
    if "html" in formats:
        files["report.html"] = html_page(comparison, plots)
    if "markdown" in formats:
        files["table.md"] = markdown_table(comparison)
    if "latex" in formats:
        files["table.tex"] = latex_table(comparison)
    files.update(plots)
    directory = Path(output) if output is not None else _default_output(paths)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode("utf-8")
        (directory / name).write_bytes(data)
    return [directory / name for name in files]


def _default_output(paths: Sequence[str | Path]) -> Path:
    if len(paths) > 1:
        return Path(DIRECTORY)
    only = Path(paths[0])
    return (only.parent if only.is_file() else only) / DIRECTORY
