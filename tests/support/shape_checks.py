"""Checks annotated shapes and types while tests run, in the functions and classes that annotate shapes.

Pyright checks the types of all other functions, at no cost for the tests. Only the first calls of a function in a test
are checked, because checking all calls would double the time of the tests.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook
from jaxtyping import jaxtyped as shapes

SOURCE = Path(__file__).parents[2] / "src"

NUM_CHECKED = 3
"""Calls of a function in a test that are checked."""

num_calls: Counter[str] = Counter()
"""Checked calls of each function in the test that runs."""

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an integer is a number


def modules_with_shapes() -> list[str]:
    """Return the modules that import jaxtyping."""
    paths = (path for path in SOURCE.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    names = (".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths)
    return sorted(names)


def first_calls(checked: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks its first calls in a test."""
    name = f"{plain.__module__}.{plain.__qualname__}"

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if num_calls[name] >= NUM_CHECKED:
            return plain(*args, **kwargs)
        num_calls[name] += 1
        with shapes("context"):  # a name of a dimension stands for one size in this call
            return checked(*args, **kwargs)

    return call


def only_with_shapes(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that checks the first calls, and has no effect on functions that annotate no shape.

    The type checker wraps the function, whereas jaxtyping's decorator calls the type checker before and after it and
    takes twice as long.
    """

    def decorate(given: Any) -> Any:
        # The annotations of these modules are strings, and a shape is a string in quotes after the type of array.
        annotations = " ".join(inspect.get_annotations(given).values())
        if not re.search(r"(?:Tensor|ndarray), *['\"]", annotations):
            return given
        if inspect.isgeneratorfunction(given):  # its body runs after the call
            return first_calls(shapes(typechecker=typechecker)(given), given)
        if inspect.isfunction(given):
            return first_calls(typechecker(given), given)
        if is_dataclass(given):
            given.__init__ = first_calls(typechecker(given.__init__), given.__init__)
        return given

    return decorate


def check_shapes() -> None:
    """Check what is imported from now on, in this process."""
    jaxtyping.jaxtyped = only_with_shapes
    install_import_hook(modules_with_shapes(), "support.shape_checks.checked")
