"""Plugins: packages that extend refusion-lit by an entry point in the group ``refusion_lit.plugins``.

The entry point names a module. The module defines decoders and objectives, which get short names in configs, and may
register default decoders. The research extras, ``refusion_lit.contrib``, are a plugin.
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
    """Import all plugins, once per process."""
    for entry in entry_points(group=GROUP):
        entry.load()


def find_class(base: type[T], name: str) -> type[T]:
    """Return a concrete subclass by name, from this package or a plugin.

    Args:
        base: The base class, such as ``Decoder``.
        name: Name of the subclass.

    Raises:
        AttributeError: If no subclass has the name.

    >>> from refusion_lit.decoding import Decoder
    >>> find_class(Decoder, "CARD")
    <class 'refusion_lit.contrib.card.CARD'>
    """
    waiting = [] if name.startswith("_") else [base]  # such as __path__, which import statements look up
    if waiting:
        load_plugins()
    while waiting:
        children = waiting.pop().__subclasses__()
        for child in children:
            if child.__name__ == name and not inspect.isabstract(child):
                return child
        waiting += children
    raise AttributeError(f"no {base.__name__} named {name!r}")
