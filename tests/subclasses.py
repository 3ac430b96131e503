"""Find the classes that a contract suite tests."""

from __future__ import annotations

import inspect
from typing import TypeVar

T = TypeVar("T")


def concrete_subclasses(cls: type[T]) -> list[type[T]]:
    """Return the package's concrete classes that inherit from a class, directly or not, sorted by name."""
    found, waiting = set(), [cls]
    while waiting:
        children = waiting.pop().__subclasses__()
        waiting += children
        found.update(c for c in children if not inspect.isabstract(c) and c.__module__.startswith("refusion_lit"))
    return sorted(found, key=lambda child: child.__name__)
