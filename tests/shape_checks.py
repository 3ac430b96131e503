"""Checks annotated shapes and types while tests run, in the functions and classes that annotate shapes.

Others take and return no tensors, or plain ones: pyright checks their types, at no cost for the tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

SOURCE = Path(__file__).parents[1] / "src"

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an integer is a number


def modules_with_shapes() -> list[str]:
    """Return the modules that import jaxtyping."""
    paths = (path for path in SOURCE.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    names = (".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths)
    return sorted(names)


def only_with_shapes(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Return jaxtyping's decorator without its effect on functions that annotate no shape: a quarter of the suite."""

    def decorator(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        check = jaxtyped(typechecker=typechecker)

        def decorate(checked: Any) -> Any:
            # The annotations of these modules are strings, and a shape is a string in quotes within one.
            annotations = " ".join(inspect.get_annotations(checked).values())
            return check(checked) if {"'", '"'} & set(annotations) else checked

        return decorate

    return decorator


def check_shapes() -> None:
    """Check what is imported from now on, in this process."""
    jaxtyping.jaxtyped = only_with_shapes(jaxtyping.jaxtyped)
    install_import_hook(modules_with_shapes(), "shape_checks.checked")
