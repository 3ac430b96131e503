"""The package stays small enough to read: bounds on files and lines, and no file imports itself through others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grimp

SCRIPT = Path(__file__).parents[2] / "docs" / "code_paths.py"

BOUNDS = {
    "command to text: files": 20,
    "command to text: lines": 2_976,
    "token ids to text: files": 18,
    "token ids to text: lines": 2_700,
    "examples to loss: files": 14,
    "examples to loss: lines": 2_393,
    "test: files": 52,
    "test: lines": 9_547,
    "package: files": 170,
    "package: lines": 26_015,
    "package: lines of code": 16_359,
}
"""Measured values. Lower them when the package shrinks; a feature that raises one says so in its commit.

The aims: command to text 20 files and 3100 lines, token ids to text 18 and 2700, examples to loss 18 and 2400, test 60
files, package 170 files, and 26 400 lines: 24 000, and 2 400 for the server, rewards and ReFusion that pays.
"""
CIRCLES: list[set[str]] = []
"""Files that import one another; the aim is that there are none."""


def test_the_package_stays_within_its_bounds() -> None:
    found = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True, timeout=600)
    sizes: dict[str, int] = json.loads(found.stdout)
    assert sizes.keys() == BOUNDS.keys()
    assert {name: size for name, size in sizes.items() if size > BOUNDS[name]} == {}


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("refusion_lit", cache_dir=None)  # imports within functions and for annotations included
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert [circle for circle in circles(imports) if circle not in CIRCLES] == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}}) == [{"a", "b", "c"}, {"e"}]


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules each of which imports all others of its group, at some remove."""
    reached = {module: _reached(imports, module) for module in sorted(imports)}
    groups: list[set[str]] = []
    for module, others in reached.items():
        group = {other for other in others if module in reached[other]}
        if group and group not in groups:
            groups.append(group)
    return groups


def _reached(imports: Mapping[str, set[str]], module: str) -> set[str]:
    """Return all modules that one imports, directly or not."""
    found: set[str] = set()
    waiting = set(imports[module])
    while waiting:
        found |= waiting
        waiting = set().union(*(imports[each] for each in waiting)) - found
    return found
