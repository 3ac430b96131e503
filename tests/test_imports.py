"""No file of the package imports itself through other files."""

from __future__ import annotations

from collections.abc import Mapping

import grimp


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("refusion_lit", cache_dir=None)  # imports within functions and for annotations included
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circles(imports) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}}) == [{"a", "b", "c"}, {"e"}]


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import one another, directly or through other modules."""
    reached = {module: _find_reachable(imports, module) for module in sorted(imports)}
    groups: list[set[str]] = []
    for module, others in reached.items():
        group = {other for other in others if module in reached[other]}
        if group and group not in groups:
            groups.append(group)
    return groups


def _find_reachable(imports: Mapping[str, set[str]], module: str) -> set[str]:
    """Return all modules that a module imports, directly or through other modules."""
    reached: set[str] = set()
    waiting = set(imports[module])
    while waiting:
        reached |= waiting
        waiting = set().union(*(imports[other] for other in waiting)) - reached
    return reached
