"""Checks of option values that raise one kind of error: the option, what was expected, what was got, the fix."""

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


def require(holds: bool, option: str, expected: str, got: object, fix: str) -> None:
    """Raise an error for users unless a condition on an option holds.

    Args:
        holds: The condition.
        option: The option's name as users write it.
        expected: The allowed values in words.
        got: The value that was given.
        fix: What to do about it, as an imperative without a full stop.

    Raises:
        OptionError: ``option: expected ..., got ...; fix.``
    """
    if not holds:
        raise OptionError(f"{option}: expected {expected}, got {got!r}; {fix}.", option)


def require_template(template: object, option: str = "prompt_template") -> str:
    """Return a prompt template; refuse a value that is no text or leaves out the query.

    >>> require_template("Question: {query}")
    'Question: {query}'
    """
    holds = isinstance(template, str) and "{query}" in template
    require(holds, option, "a text with {query} in it", template, "put {query} where the query belongs")
    return str(template)


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a number of a kind; a boolean is not a number."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require_at_least(option: str, value: float | None, minimum: float) -> None:
    """Refuse a value below ``minimum``, or of another kind; an integer minimum stands for integer options."""
    kind, name = (Integral, "an integer") if isinstance(minimum, int) else (Real, "a number")
    holds = value is not None and is_number(value, kind) and value >= minimum
    require(holds, option, f"{name} of at least {minimum}", value, f"set {option} to {minimum} or more")


def require_number(option: str, value: float, interval: str, fix: str = "set it in that range") -> None:
    """Refuse a value outside an interval such as ``(0, 1]``, or of another kind."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    holds = is_number(value, Real) and low <= value <= high
    holds = holds and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
    require(holds, option, f"a number in {interval}", value, fix)


def require_choice(option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices; literal types are not checked when called from Python."""
    require(value in choices, option, f"one of {', '.join(map(str, choices))}", value, "choose one of them")


def check_options(options: DataclassInstance, prefix: str = "") -> None:
    """Refuse values of a dataclass's options that its type annotations or its ranges exclude.

    The class variable ``ranges`` holds an option's minimum, for :func:`require_at_least`, or its interval, for
    :func:`require_number`, by its name; those of the base classes hold, too. An option with a literal type must have
    one of its values, a ``bool`` must be true or false, and ``None`` passes where the type has it.

    Args:
        options: The dataclass instance.
        prefix: Where the options are in a config, as in ``objective.``.

    Raises:
        ValueError: Naming the option, what was expected and what was got.
    """
    for name, (choices, limit, optional) in _allowed(type(options)).items():
        option, value = prefix + name, getattr(options, name)
        if optional and value is None:
            continue
        if choices:
            require_choice(option, value, choices)
        if isinstance(limit, str):
            require_number(option, value, limit)
        elif limit is not None:
            require_at_least(option, value, limit)


@cache
def _allowed(kind: type[DataclassInstance]) -> dict[str, tuple[tuple[object, ...], float | str | None, bool]]:
    """Return each option's choices, its minimum or interval, and whether it may be ``None``."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # a type that is imported for type checkers only, or local to a function
        hints = {}
    ranges = {name: limit for each in reversed(kind.__mro__) for name, limit in vars(each).get("ranges", {}).items()}
    names = [field.name for field in fields(kind)]
    own = {name for name, hint in get_annotations(kind).items() if "ClassVar" not in str(hint) and name[0] != "_"}
    missing = sorted((own | ranges.keys()) - {*names})
    fix = f"put @dataclass(frozen=True, kw_only=True) before class {kind.__name__}, or correct its ranges"
    require(not missing, kind.__name__, "a dataclass with its own options", f"none of {', '.join(missing)}", fix)
    found = {}
    for name in names:
        kinds = (hints.get(name), *get_args(hints.get(name)))
        literals = tuple(value for each in kinds if get_origin(each) is Literal for value in get_args(each))
        choices = literals or ((True, False) if bool in kinds else ())
        found[name] = (choices, ranges.get(name), name not in hints or type(None) in kinds)
    return found
