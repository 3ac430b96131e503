"""Compare a fresh result with a committed one, within stated tolerances: compare.py COMMITTED FRESH RECIPE.

RECIPE, an experiment's ``reproduce.yaml``, holds ``compare``: a mapping from dotted paths (``*`` for every key or
index) to tolerances, ``absolute``, ``relative`` or both, of which one must hold. What no path names is not compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli


def find_values(values: Any, path: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield every place that a path names, with what stands there."""
    if not path:
        yield "", values
        return
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        if path[0] in ("*", str(key)):
            for rest, leaf in find_values(value, path[1:]):
                yield f"{key}.{rest}" if rest else str(key), leaf


def differences(committed: Any, fresh: Any, compare: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return what lies outside its tolerance, or is missing on one side.

    Raises:
        ValueError: If a path names nothing in the committed result, or a tolerance is unknown.
    """
    problems = []
    for pattern, tolerance in compare.items():
        if not tolerance or not set(tolerance) <= {"absolute", "relative"}:
            raise ValueError(f"compare.{pattern}: expected absolute and/or relative, got {dict(tolerance)}.")
        old, new = (dict(find_values(values, pattern.split("."))) for values in (committed, fresh))
        if not old:
            raise ValueError(f"compare.{pattern}: names nothing in the committed result; mend the path.")
        problems += [f"{place}: in one of the two results only" for place in sorted(old.keys() ^ new.keys())]
        for place in old.keys() & new.keys():
            allowed = max(tolerance.get("absolute", 0.0), tolerance.get("relative", 0.0) * abs(old[place]))
            if not abs(old[place] - new[place]) <= allowed:  # so written that nan is a difference
                problems.append(f"{place}: committed {old[place]}, fresh {new[place]}, allowed difference {allowed:g}")
    return problems


def main(committed: str, fresh: str, recipe: str) -> int:
    """Print the differences between a fresh result and the committed one; return 1 if there are any.

    Args:
        committed: JSON file of the committed result.
        fresh: JSON file of the fresh result.
        recipe: The experiment's ``reproduce.yaml``, which names the values to compare and their tolerances.
    """
    old, new = (json.loads(Path(path).read_text(encoding="utf-8")) for path in (committed, fresh))
    problems = differences(old, new, yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))["compare"])
    for line in problems or ["reproduced: every figure within its tolerance"]:
        sys.stdout.write(line + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(auto_cli(main))
