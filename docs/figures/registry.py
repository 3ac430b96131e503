"""The registry of generated tables and plots, and the block that names their sources.

The table NAME writes the text between ``<!-- figures: NAME -->`` and ``<!-- end -->`` on a page. The text between
``<!-- sources -->`` and ``<!-- end -->`` names the JSON files and commits of all tables of the page.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEASURED = ("benchmarks", "experiments")
"""Folders whose JSON is ours and carries commits; other sources are reference outputs of other programs."""
_MARKED = re.compile(r"<!-- figures: (?P<name>.+?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
_SOURCES = re.compile(r"<!-- sources -->\n.*?<!-- end -->", re.DOTALL)
_START = "<!-- figures:"
WITHOUT_SOURCES = ("README.md",)
"""Pages that link to the pages with the sources of their tables."""
_SVG_DIGEST = re.compile(r"<!-- data: ([0-9a-f]+) -->\n?\Z")


@dataclass(frozen=True)
class Table:
    """A Markdown text made from committed JSON.

    Attributes:
        make: Takes the content of each source, in order, and returns the text.
        sources: Paths of JSON files from the repository's root.
    """

    make: Callable[..., str]
    sources: tuple[str, ...]

    def markdown(self) -> str:
        """Return the text."""
        return self.make(*map(read, self.sources)).strip()


@dataclass(frozen=True)
class Plot:
    """A picture drawn from committed JSON.

    Attributes:
        data: Takes the content of each source and returns what is drawn, as JSON values.
        draw: Draws these values into a file.
        sources: Paths of JSON files from the repository's root.
    """

    data: Callable[..., Any]
    draw: Callable[[Any, Path], None]
    sources: tuple[str, ...]

    def values(self) -> Any:  # noqa: ANN401 - JSON
        """Return what is drawn."""
        return self.data(*map(read, self.sources))


TABLES: dict[str, Table] = {}
"""By the name in a page's marker."""
FILES: dict[str, str] = {}
"""Whole files, by path, and the name of their table."""
PLOTS: dict[str, Plot] = {}
"""By path."""


def table(name: str, *sources: str, file: str | None = None) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register a function as the table of this name, and as the content of ``file`` if that is given."""

    def register(make: Callable[..., str]) -> Callable[..., str]:
        TABLES[name] = Table(make, sources)
        if file is not None:
            FILES[file] = name
        return make

    return register


def read(source: str) -> Any:  # noqa: ANN401 - JSON
    """Return the content of a JSON file of the repository."""
    return json.loads((ROOT / source).read_text(encoding="utf-8"))


def stamps(values: Any) -> Iterator[tuple[str, bool]]:  # noqa: ANN401 - JSON
    """Yield each commit recorded anywhere in a result, and whether its tree had uncommitted changes."""
    if isinstance(values, Mapping):
        for name in ("commit", "source_commit"):
            if isinstance(values.get(name), str):
                yield values[name], bool(values.get("dirty"))
    inner = values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ()
    for value in inner:
        yield from stamps(value)


def provenance(values: Any) -> str:  # noqa: ANN401 - JSON
    """Return the commits of a result, those with uncommitted changes marked, and its ``commit_note``."""
    note = values.get("commit_note", "") if isinstance(values, Mapping) else ""
    dirty: dict[str, bool] = {}
    for commit, changed in stamps(values):
        if changed or commit[:10] not in note:  # else the note names it
            dirty[commit] = dirty.get(commit, False) or changed
    parts = []
    for changed, label in ((False, ""), (True, "<b>with uncommitted changes</b> to ")):
        commits = [commit[:10] for commit, is_dirty in dirty.items() if is_dirty == changed]
        parts += [f"{label}commit{'s' * (len(commits) > 1)} {', '.join(commits)}"] if commits else []
    return "; ".join([*parts, *([note] if note else [])]) or "no commit recorded"


def source_block(sources: Iterable[str]) -> str:
    """Return a collapsed block that lists files, commits and uncommitted changes."""
    lines = []
    for source in dict.fromkeys(sources):
        is_ours = source.startswith(MEASURED) and not source.endswith("published.json")
        lines.append(f"<li><code>{source}</code>{f': {provenance(read(source))}' if is_ours else ''}</li>")
    return "\n".join(["<details><summary>Sources of the tables</summary>", "<ul>", *lines, "</ul>", "</details>"])


def fill(text: str, page: str) -> str:
    """Return a page with the text between its markers written again.

    Raises:
        ValueError: If a marker has no end or names no table, or if a page with tables has no block of sources.
    """

    def written(marked: re.Match[str]) -> str:
        name = marked["name"]
        if name not in TABLES:
            raise ValueError(f"{page}: expected <!-- figures: NAME --> with {', '.join(sorted(TABLES))}, got {name}.")
        return f"<!-- figures: {name} -->\n\n{TABLES[name].markdown()}\n\n<!-- end -->"

    marks = list(_MARKED.finditer(text))
    if len(marks) != text.count(_START) or any(_START in mark["body"] for mark in marks):
        raise ValueError(f"{page}: expected <!-- end --> after each {_START} NAME -->, got a marker without; add it.")
    if marks and page not in WITHOUT_SOURCES and not _SOURCES.search(text):
        raise ValueError(f"{page}: expected <!-- sources --> and <!-- end --> on a page with tables, got none; add it.")
    text = _MARKED.sub(written, text)
    sources = source_block(source for name in names_in(text) for source in TABLES[name].sources)
    return _SOURCES.sub(lambda _: f"<!-- sources -->\n\n{sources}\n\n<!-- end -->", text)


def names_in(text: str) -> list[str]:
    """Return the names of a page's tables."""
    return [marked["name"] for marked in _MARKED.finditer(text)]


def digest(values: Any) -> str:  # noqa: ANN401 - JSON
    """Return a digest of what a plot draws."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def drawn_from(path: Path) -> str | None:
    """Return the digest that a picture carries; ``None`` if it carries none, or does not exist."""
    if not path.exists():
        return None
    if path.suffix == ".svg":
        match = _SVG_DIGEST.search(path.read_text(encoding="utf-8"))
        return match[1] if match else None
    from PIL import Image

    with Image.open(path) as picture:
        picture.load()
        return picture.info.get("data")


def draw(plot: Plot, path: Path) -> None:
    """Draw a plot, and write the digest of its values into the file: pixels differ between versions of matplotlib."""
    values = plot.values()
    plot.draw(values, path)
    if path.suffix == ".svg":
        text = path.read_text(encoding="utf-8").rstrip("\n")
        path.write_text(f"{text}\n<!-- data: {digest(values)} -->\n", encoding="utf-8")
        return
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("data", digest(values))
    with Image.open(path) as picture:
        picture.load()
    picture.save(path, pnginfo=info, dpi=picture.info.get("dpi"), optimize=True)
