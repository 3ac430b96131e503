"""Places where cosmic-ray's operators can change the source, and a sample of such changes."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

PACKAGES = ("engine", "families", "learning", "refusion")


def statement(source: str, line: int) -> tuple[range, bool]:
    """Return the lines of the innermost statement (of a compound one: its head), and whether a function runs it."""
    lines, in_function = range(line, line + 1), False
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or node.end_lineno is None or not node.lineno <= line <= node.end_lineno:
            continue
        body = getattr(node, "body", None)
        stop = body[0].lineno if body else node.end_lineno + 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and line >= stop:
            in_function = True
        if line < stop:
            lines = range(node.lineno, stop)
    return lines, in_function


def sites(tree: Path) -> dict[tuple[str, int, int, str], list[tuple[str, int]]]:
    """Return the sites and, for each, its changes: an operator and the number of the operator's occurrence."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    mutants: dict[tuple[str, int, int, str], list[tuple[str, int]]] = defaultdict(list)
    for path in sorted(path for name in PACKAGES for path in (tree / "src/refusion_lit" / name).rglob("*.py")):
        nodes = list(ast_nodes(get_ast(path.read_text())))
        for name in operator_names():
            operator = get_operator(name)
            if operator.arguments():  # such ask for names of variables
                continue
            places = (place for node in nodes for place in operator().mutation_positions(node))
            family = name.partition("/")[2].partition("_")[0]
            for occurrence, place in enumerate(places):
                start = place[0] if isinstance(place[0], tuple) else place
                mutants[str(path.relative_to(tree)), start[0], start[1], family].append((name, occurrence))
    return mutants


def essence(source: str) -> str | None:
    """Return a program without annotations, which never run here; ``None`` if it is none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def sample(tree: Path, num: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Draw mutants; return them and the number of sites (those without a proper change included)."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    population, rng = sites(tree), random.Random(seed)
    order = sorted(population)
    rng.shuffle(order)
    drawn: list[dict[str, Any]] = []
    for path, line, column, family in order:
        source = (tree / path).read_text()
        changes = list(population[path, line, column, family])
        rng.shuffle(changes)
        for name, occurrence in changes:
            mutated = mutate_code(source, get_operator(name)(), occurrence)
            if mutated is None or essence(mutated) in (None, essence(source)):
                continue
            pairs = zip(source.splitlines(), mutated.splitlines(), strict=False)
            before, after = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))
            operator = name.partition("/")[2]
            drawn.append({"number": len(drawn), "path": path, "line": line, "operator": operator, "before": before,
                          "after": after, "source": mutated})  # fmt: skip
            break
        if len(drawn) == num:
            break
    return drawn, len(order)
