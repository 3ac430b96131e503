"""A trace as a terminal animation and as plain text."""

from __future__ import annotations

import io

from rich.console import Console

from refusion_lit.traces import animate, print_statistics
from traces.samples import plan_and_verify

PLAIN = """\
decoder: ReFusion
(drafted) ~rejected~ · masked
plan: drafts the first tokens of all masked slots, to choose the slots that are filled next
verify: scores the drafted tokens from left to right; those that are certain enough are accepted
forward 1/4, plan: 4 drafted
    (abcd)··
forward 2/4, verify: 2 accepted, 2 rejected
    ~ab~cd··
forward 3/4, plan: 4 drafted, 2 re-planned
    (eb)cd(gh)
forward 4/4, verify: 2 accepted
    ebcd(gh)
"""


def test_plain_text_if_the_console_is_not_a_terminal() -> None:
    file = io.StringIO()
    animate(plan_and_verify(), console=Console(file=file, force_terminal=False, width=40), seconds_per_forward=60)
    assert file.getvalue() == PLAIN


def test_the_animation_waits_once_a_forward_and_shows_each() -> None:
    file, waits = io.StringIO(), []
    console = Console(file=file, force_terminal=True, width=100, color_system="truecolor")
    animate(plan_and_verify(), console=console, seconds_per_forward=0.5, sleep=waits.append)
    assert waits == [0.5] * 4
    for number in range(1, 5):
        assert f"forward {number}/4" in file.getvalue()
    assert file.getvalue().count("This forward drafts the first tokens of all masked slots") == 2


def test_text_cannot_control_the_terminal() -> None:
    trace = plan_and_verify(dict.fromkeys(range(1, 9), "\x1b]0;owned\x07\x9b2J\r[red]"))
    for terminal in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=2000, color_system=None)
        animate(trace, console=console, seconds_per_forward=0)
        shown = file.getvalue()
        assert "\x1b]" not in shown
        assert not {"\x07", "\x9b"} & set(shown)
        assert "[red]" in shown


def test_statistics_are_printed() -> None:
    file = io.StringIO()
    print_statistics(plan_and_verify(), console=Console(file=file, width=80))
    cells = {tuple(cell.strip() for cell in line.split("│")[1:3]) for line in file.getvalue().splitlines()}
    assert {("tokens", "4"), ("slots out of order", "1 of 2 (50 %)"), ("forwards: verify", "2")} <= cells
