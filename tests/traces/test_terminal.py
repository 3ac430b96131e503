"""A trace as a terminal animation and as a table."""

from __future__ import annotations

import io

from rich.console import Console

from refusion_lit.traces.display import animate, print_statistics
from traces.samples import plan_and_verify


def test_the_animation_waits_once_a_forward_and_shows_each() -> None:
    file, waits = io.StringIO(), []
    console = Console(file=file, force_terminal=True, width=100, color_system="truecolor")
    animate(plan_and_verify(), console=console, sleep=waits.append)
    assert waits == [0.4] * 4
    for number in range(1, 5):
        assert f"forward {number}/4" in file.getvalue()
    assert file.getvalue().count("This forward drafts the first tokens of all masked slots") == 2


def test_text_cannot_control_the_terminal() -> None:
    trace = plan_and_verify(dict.fromkeys(range(1, 9), "\x1b]0;owned\x07\x9b2J\r[red]"))
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=2000, color_system=None)
    animate(trace, console=console, sleep=lambda _: None)
    shown = file.getvalue()
    assert "\x1b]" not in shown
    assert not {"\x07", "\x9b"} & set(shown)
    assert "[red]" in shown


def test_nothing_is_animated_elsewhere_than_on_a_terminal() -> None:
    file = io.StringIO()
    animate(plan_and_verify(), console=Console(file=file, force_terminal=False))
    assert not file.getvalue()


def test_statistics_are_printed() -> None:
    file = io.StringIO()
    print_statistics(plan_and_verify(), console=Console(file=file, width=80))
    cells = {tuple(cell.strip() for cell in line.split("│")[1:3]) for line in file.getvalue().splitlines()}
    assert {("tokens", "4"), ("slots out of order", "1 of 2 (50 %)"), ("forwards: verify", "2")} <= cells
