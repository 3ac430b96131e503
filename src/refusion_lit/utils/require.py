"""Checks of option values; an error names the option, the expected and the given value, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from inspect import get_annotations
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class OptionError(ValueError):
    """Error about the value of an option.

    Args:
        message: The message, which begins with the option's name and a colon.
        option: The option's name.
    """

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option

    def rename(self, option: str) -> str:
        """Return the message with another name for the option.

        >>> error = OptionError("max_new_tokens: expected at least 3, got 1; raise it.", "max_new_tokens")
        >>> error.rename("max_tokens")
        'max_tokens: expected at least 3, got 1; raise it.'
        """
        return option + str(self).removeprefix(self.option)


def require(condition: bool, option: str, expected: str, got: object, fix: str) -> None:
    """Raise an error for users unless a condition on an option holds.

    Args:
        condition: The condition.
        option: The option's name as users write it.
        expected: The allowed values in words.
        got: The given value.
        fix: What to do, as an imperative without a full stop.

    Raises:
        OptionError: ``option: expected ..., got ...; fix.``
    """
    if not condition:
        text = " ".join(map(str.strip, repr(got).splitlines()))  # a tensor's lines
        text = text if len(text) <= 300 else f"{text:.300}..."
        raise OptionError(f"{option}: expected {expected}, got {text}; {fix}.", option)


def require_template(template: object, option: str = "prompt_template") -> str:
    """Return a prompt template; refuse a value that is no text or leaves out the query.

    >>> require_template("Question: {query}")
    'Question: {query}'
    """
    is_template = isinstance(template, str) and "{query}" in template
    require(is_template, option, "a text with {query} in it", template, "put {query} where the query belongs")
    return str(template)


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a number of a kind; a boolean is not a number."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require_at_least(option: str, value: float | None, minimum: float) -> None:
    """Refuse a value below ``minimum`` or of another type; an integer minimum allows integers only."""
    kind, name = (Integral, "an integer") if isinstance(minimum, int) else (Real, "a number")
    is_allowed = value is not None and is_number(value, kind) and value >= minimum
    fix = f"set {option.rpartition(': ')[2]} to {minimum} or more"
    require(is_allowed, option, f"{name} of at least {minimum}", value, fix)


def require_number(option: str, value: float, interval: str, fix: str = "set it in that range") -> None:
    """Refuse a value outside an interval such as ``(0, 1]``, or of another type."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    is_inside = is_number(value, Real) and low <= value <= high
    is_inside = is_inside and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
    require(is_inside, option, f"a number in {interval}", value, fix)


def require_range(option: str, value: float, limit: float | str) -> None:
    """Refuse a value below a minimum, see :func:`require_at_least`, or outside an interval."""
    (require_number if isinstance(limit, str) else require_at_least)(option, value, limit)  # type: ignore[arg-type]


def require_choice(option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not among the choices, because Python does not check literal types."""
    require(value in choices, option, f"one of {', '.join(map(str, choices))}", value, "choose one of them")


def check_options(options: DataclassInstance, prefix: str = "") -> None:
    """Check a dataclass's options against its type annotations and its ``ranges``.

    The class variable ``ranges`` has minimums, for :func:`require_at_least`, and intervals, for :func:`require_number`,
    by option; the ranges of base classes apply, too. An option with a literal type must have a value of the type, a
    ``bool`` must be true or false, and ``None`` is allowed if the type allows it.

    Args:
        options: The dataclass instance.
        prefix: The options' group in a config, as in ``objective.``.

    Raises:
        ValueError: Naming the option, the expected and the given value.
    """
    for name, (choices, limit, optional) in _read_ranges(type(options)).items():
        option, value = prefix + name, getattr(options, name)
        if optional and value is None:
            continue
        if choices:
            require_choice(option, value, choices)
        if limit is not None:
            require_range(option, value, limit)


@cache
def _read_ranges(kind: type[DataclassInstance]) -> dict[str, tuple[tuple[object, ...], float | str | None, bool]]:
    """Return choices, minimum or interval, and whether ``None`` is allowed, by option."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # a type that is imported for type checkers only, or local to a function
        hints = {}
    ranges = {name: limit for base in reversed(kind.__mro__) for name, limit in vars(base).get("ranges", {}).items()}
    names = [field.name for field in fields(kind)]
    annotated = {name for name, hint in get_annotations(kind).items() if "ClassVar" not in str(hint) and name[0] != "_"}
    missing = sorted((annotated | ranges.keys()) - {*names})
    fix = f"put @dataclass(frozen=True, kw_only=True) before class {kind.__name__}, or correct its ranges"
    require(not missing, kind.__name__, "a dataclass with its own options", f"none of {', '.join(missing)}", fix)
    allowed = {}
    for name in names:
        kinds = (hints.get(name), *get_args(hints.get(name)))
        literals = tuple(value for hint in kinds if get_origin(hint) is Literal for value in get_args(hint))
        choices = literals or ((True, False) if bool in kinds else ())
        allowed[name] = (choices, ranges.get(name), name not in hints or type(None) in kinds)
    return allowed
