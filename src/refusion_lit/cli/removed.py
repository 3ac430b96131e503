"""Options and classes that earlier versions had, each with what to do instead.

An unknown option or class that is listed here is refused with its line. A key is the end of an option's dotted name
(``backbone.compile`` matches ``model.backbone.compile``), or the name of a class. A value is one sentence without a
full stop: why it went, and the replacement if there is one.
"""

from __future__ import annotations

REMOVED = {
    "backbone.compile": "compiled decode steps were slower (0.70 to 0.997 times) where they were measured",
    "objective.kernel": "the fused loss of liger-kernel was never measured; leave it out",
}


def removal_of(name: str) -> str | None:
    """Return why an option or a class was removed; ``None`` if there never was one of this name.

    Args:
        name: Dotted name of an option, or name or import path of a class.
    """
    parts = name.split(".")
    return next(filter(None, (REMOVED.get(".".join(parts[start:])) for start in range(len(parts)))), None)
