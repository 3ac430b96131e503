"""Checks of option values that raise one kind of error: the option, what was expected, what was got, the fix."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real


def require(holds: bool, option: str, expected: str, got: object, fix: str) -> None:
    """Raise a ``ValueError`` for users unless a condition on an option holds.

    Args:
        holds: The condition.
        option: The option's name as users write it.
        expected: The allowed values in words.
        got: The value that was given.
        fix: What to do about it, as an imperative without a full stop.

    Raises:
        ValueError: ``option: expected ..., got ...; fix.``
    """
    if not holds:
        raise ValueError(f"{option}: expected {expected}, got {got!r}; {fix}.")


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a number of a kind; a boolean is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require_at_least(option: str, value: float | None, minimum: float, *, optional: bool = False) -> None:
    """Refuse a value below ``minimum``, or of another kind; an integer minimum stands for integer options.

    With ``optional`` it may be ``None``.
    """
    if optional and value is None:
        return
    kind, name = (Integral, "an integer") if isinstance(minimum, int) else (Real, "a number")
    holds = value is not None and is_number(value, kind) and value >= minimum
    require(holds, option, f"{name} of at least {minimum}", value, f"set {option} to {minimum} or more")


def require_between(option: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse an integer outside [``minimum``, ``maximum``]."""
    fix = f"set {option} to {minimum} to {maximum}"
    holds = is_number(value, Integral) and minimum <= value <= maximum
    require(holds, option, f"an integer from {minimum} to {maximum}", value, fix)


def require_probability(option: str, value: float) -> None:
    """Refuse a value outside [0, 1], or of another kind."""
    holds = is_number(value, Real) and 0 <= value <= 1
    require(holds, option, "a probability in [0, 1]", value, f"set {option} between 0 and 1")


def require_number(option: str, value: float, interval: str, fix: str = "set it in that range") -> None:
    """Refuse a value outside an interval such as ``(0, 1]``, or of another kind."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    holds = is_number(value, Real) and low <= value <= high
    holds = holds and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
    require(holds, option, f"a number in {interval}", value, fix)


def require_choice(option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices; literal types are not checked when called from Python."""
    require(value in choices, option, f"one of {', '.join(map(str, choices))}", value, "choose one of them")
