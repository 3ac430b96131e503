"""Packages that extend refusion-lit: entry points of the group ``refusion_lit.plugins``.

An entry point names a module. Importing it defines decoders and objectives, which then have short names in configs, and
may register default decoders. The research extras of this package, ``refusion_lit.contrib``, are such a module.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

GROUP = "refusion_lit.plugins"
T = TypeVar("T")


@cache
def load_plugins() -> None:
    """Import the modules of all plugins, once per process."""
    for entry in entry_points(group=GROUP):
        entry.load()


def find_class(base: type[T], name: str) -> type[T]:
    """Return the concrete subclass of a class by its name, from this package or a plugin.

    Args:
        base: The base class, such as ``Decoder``.
        name: The name of the class.

    Raises:
        AttributeError: If there is no such class.
    """
    load_plugins()
    waiting = [base]
    while waiting:
        children = waiting.pop().__subclasses__()
        for child in children:
            if child.__name__ == name and not inspect.isabstract(child):
                return child
        waiting += children
    raise AttributeError(f"no {base.__name__} named {name!r}")
