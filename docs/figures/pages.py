"""All pages and files with generated content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import page as results_page
from docs.figures import of_benchmarks, of_experiments  # noqa: F401 - they fill the registry
from docs.figures.registry import FILES, PLOTS, ROOT, TABLES, digest, drawn_from, fill, source_block

_RESULTS = ROOT / "benchmarks" / "results"


def pages() -> list[Path]:
    """Return the Markdown pages whose markers are filled."""
    patterns = ("README.md", "docs/**/*.md", "experiments/*/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def contents() -> Iterator[tuple[Path, str]]:
    """Yield each text file with generated content, and what it should hold."""
    for path in pages():
        yield path, fill(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    for name, made_by in FILES.items():
        yield ROOT / name, f"{TABLES[made_by].markdown()}\n\n{source_block(TABLES[made_by].sources)}\n"
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(_RESULTS.glob("*.json"))}
    yield _RESULTS / "README.md", results_page(results)


def outdated_plots() -> Iterator[Path]:
    """Yield each picture that was not drawn from the committed values."""
    for name, plot in PLOTS.items():
        if drawn_from(ROOT / name) != digest(plot.values()):
            yield ROOT / name
