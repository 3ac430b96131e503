"""Find the classes that a contract suite tests."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import TypeVar

from refusion_lit.plugins import load_plugins

T = TypeVar("T")


def concrete_subclasses(cls: type[T]) -> list[type[T]]:
    """Return the concrete classes that inherit from a class, directly or not, sorted by name.

    The classes are of this package and of the modules that the variable CONTRACT names (docs/extending.md).
    """
    modules = ("refusion_lit", *os.environ.get("CONTRACT", "").split())
    load_plugins()
    for name in modules:
        importlib.import_module(name)
    classes, parents = set(), [cls]
    while parents:
        children = parents.pop().__subclasses__()
        parents += children
        classes.update(c for c in children if not inspect.isabstract(c) and c.__module__.startswith(modules))
    return sorted(classes, key=lambda child: child.__name__)
