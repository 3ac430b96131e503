"""Error messages name the option, the expected value, the given value and the fix."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

from refusion_lit.utils.require import (
    check_options,
    require,
    require_at_least,
    require_choice,
    require_number,
)


def test_the_error_names_option_expectation_value_and_fix() -> None:
    require(True, "size", "an even number", 4, "add one")
    with pytest.raises(ValueError, match=r"^size: expected an even number, got '3'; add one\.$"):
        require(False, "size", "an even number", "3", "add one")


@pytest.mark.parametrize("got", ["a" * 10_000, ["b"] * 10_000, torch.zeros(3, 3)], ids=["text", "list", "tensor"])
def test_the_error_of_a_long_value_is_one_short_line(got: object) -> None:
    with pytest.raises(ValueError, match=r"^size: expected an even number, got ") as error:
        require(False, "size", "an even number", got, "add one")
    message = str(error.value)
    assert len(message) < 500
    assert len(message.splitlines()) == 1
    assert message.endswith("; add one.")


def test_the_error_has_the_whole_of_a_short_value_of_several_lines() -> None:
    with pytest.raises(ValueError, match=r"got tensor\(\[\[0, 0\], \[0, 0\]\]\); add one"):
        require(False, "size", "an even number", torch.zeros(2, 2, dtype=torch.int64), "add one")


@pytest.mark.parametrize(
    ("value", "minimum", "message"),
    [
        (0, 1, "n: expected an integer of at least 1, got 0; set n to 1 or more."),
        (2.5, 1, "n: expected an integer of at least 1, got 2.5; set n to 1 or more."),
        (True, 1, "n: expected an integer of at least 1, got True; set n to 1 or more."),
        ("5", 1, "n: expected an integer of at least 1, got '5'; set n to 1 or more."),
        (None, 0.0, "n: expected a number of at least 0.0, got None; set n to 0.0 or more."),
        (-0.5, 0.0, "n: expected a number of at least 0.0, got -0.5; set n to 0.0 or more."),
        (math.nan, 0.0, "n: expected a number of at least 0.0, got nan; set n to 0.0 or more."),
    ],
)
def test_a_value_below_its_minimum_is_refused(value: Any, minimum: float, message: str) -> None:
    require_at_least("n", minimum, minimum)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require_at_least("n", value, minimum)


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", (1e-9, 1, 1.0), (0, -1, 1.001, float("nan"), "a", True, None)),
        ("[0, 1)", (0, 0.999), (1, -1e-9)),
        ("(0, inf)", (1e-9, 1e300), (0, float("inf"))),
        ("[-inf, inf]", (float("-inf"), float("inf")), (float("nan"),)),
    ],
)
def test_an_interval_is_open_or_closed_at_each_end(interval: str, inside: Any, outside: Any) -> None:
    for value in inside:
        require_number("n", value, interval)
    for value in outside:
        message = f"n: expected a number in {interval}, got {value!r}; set it in that range."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            require_number("n", value, interval)


def test_choices() -> None:
    require_choice("mode", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^mode: expected one of a, b, got 'c'; choose one of them\.$"):
        require_choice("mode", "c", ("a", "b"))


Rule = Literal["first", "last"]


@dataclass(kw_only=True)
class Options:
    ranges = {"size": 1, "share": "[0, 1]"}
    size: int = 4
    share: float | None = 0.5
    rule: Rule | None = "first"
    fast: bool = True


@dataclass(kw_only=True)
class MoreOptions(Options):
    ranges = {"weight": 0.0, "size": 2}
    weight: float = 1.0


@dataclass(kw_only=True)
class UnknownTypes:
    """Has an annotation that cannot be evaluated when the program runs."""

    ranges = {"size": 1}
    size: int | None = 4
    place: Path | None = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(size=0), "x.size: expected an integer of at least 1, got 0; set x.size to 1 or more."),
        (Options(size=None), "x.size: expected an integer of at least 1, got None; set x.size to 1 or more."),  # pyright: ignore
        (Options(share=1.5), "x.share: expected a number in [0, 1], got 1.5; set it in that range."),
        (Options(rule="a"), "x.rule: expected one of first, last, got 'a'; choose one of them."),  # pyright: ignore
        (Options(fast="a"), "x.fast: expected one of True, False, got 'a'; choose one of them."),  # pyright: ignore
        (MoreOptions(share=-1), "x.share: expected a number in [0, 1], got -1; set it in that range."),
        (MoreOptions(size=1), "x.size: expected an integer of at least 2, got 1; set x.size to 2 or more."),
        (MoreOptions(weight=-1), "x.weight: expected a number of at least 0.0, got -1; set x.weight to 0.0 or more."),
        (UnknownTypes(size=0), "x.size: expected an integer of at least 1, got 0; set x.size to 1 or more."),
    ],
)
def test_options_outside_their_types_and_ranges_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_options(options, "x.")


def test_a_range_of_no_option_is_refused() -> None:
    @dataclass(kw_only=True)
    class Misspelt:
        ranges = {"sise": 1}
        size: int = 4

    with pytest.raises(ValueError, match=r"^Misspelt: expected .*, got 'none of sise'; .*, or correct its ranges\.$"):
        check_options(Misspelt())


def test_options_within_their_types_and_ranges_pass() -> None:
    for options in (Options(), Options(share=None, rule=None), MoreOptions(), UnknownTypes(size=None)):
        check_options(options)
