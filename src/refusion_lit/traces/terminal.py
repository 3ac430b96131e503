"""A trace in a terminal: an animation, or one plain line a forward where it is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from refusion_lit.traces.display import visible
from refusion_lit.traces.document import Trace
from refusion_lit.traces.summary import TraceStatistics
from refusion_lit.traces.timeline import Change, Timeline, timeline

_LOW, _HIGH = (70, 110, 200), (254, 232, 56)  # blue to yellow: told apart with every common colour blindness


def round_style(number: int, num_forwards: int) -> Style:
    """Return the colours of text that a forward made final.

    Args:
        number: The forward's number, from 1.
        num_forwards: Number of the last one.
    """
    part = (number - 1) / max(num_forwards - 1, 1)
    red, green, blue = (round(low + (high - low) * part) for low, high in zip(_LOW, _HIGH, strict=True))
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")


def animate(
    trace: Trace,
    *,
    console: Console,
    seconds_per_forward: float = 0.4,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show a decode forward by forward; all at once and in plain text where the console is no terminal.

    Args:
        trace: The decode.
        console: Where to show it.
        seconds_per_forward: How long a forward stays, at least 0.
        sleep: Waits.
    """
    line = timeline(trace)
    if not console.is_terminal:
        for number in range(1, trace.num_forwards + 1):
            console.print(_plain(trace, line, number), markup=False, highlight=False, soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for number in range(trace.num_forwards + 1):
            live.update(_frame(trace, line, number), refresh=True)
            if number < trace.num_forwards:
                sleep(seconds_per_forward)


def print_statistics(statistics: TraceStatistics, *, console: Console) -> None:
    """Print statistics over traces as a table."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows: list[tuple[str, object]] = [
        ("traces", statistics.num_traces),
        ("tokens", statistics.num_tokens),
        ("forwards", statistics.num_forwards),
        ("tokens/forward", f"{statistics.tokens_per_forward:.2f}"),
        ("acceptance length (tokens a round)", f"{statistics.mean_acceptance_length:.2f}"),
        ("slots a round", f"{statistics.mean_slots_per_round:.2f}"),
        ("slots out of order", f"{statistics.num_slots_out_of_order}/{statistics.num_slots}"),
        ("drafts", statistics.num_drafts),
        ("drafts rejected and re-planned", statistics.num_replanned),
        *((f"forwards: {visible(phase)}", number) for phase, number in statistics.forwards_by_phase.items()),
    ]
    for name, value in rows:
        table.add_row(Text(name), Text(str(value)))
    console.print(table)


def _head(trace: Trace, line: Timeline, number: int) -> str:
    if number == 0:
        return f"before the first of {trace.num_forwards} forwards"
    statuses = [change.status for change in line.changes[number - 1]]
    counts = ", ".join(f"{statuses.count(name)} {name}" for name in ("accepted", "drafted", "rejected"))
    again = sum(change.status == "drafted" and change.num_drafts > 1 for change in line.changes[number - 1])
    return (
        f"forward {number}/{trace.num_forwards} {visible(trace.rounds[number - 1].phase)}: {counts}, {again} re-planned"
    )


def _plain(trace: Trace, line: Timeline, number: int) -> str:
    """Return one forward as a line: final text as it is, rejected drafts in ~~, other drafts in (), masks as dots."""
    marks = {"accepted": ("", ""), "drafted": ("(", ")"), "rejected": ("~", "~")}
    text = ""
    status: str | None = None
    for place in line.after(number):
        new = None if place is None else place.status
        if new != status:
            text += (marks[status][1] if status else "") + (marks[new][0] if new else "")
            status = new
        text += "·" if place is None else _piece(trace, place)
    return f"{_head(trace, line, number)}\n    {text}{marks[status][1] if status else ''}"


def _frame(trace: Trace, line: Timeline, number: int) -> Group:
    text = Text()
    forwards = line.final_forwards()
    for index, place in enumerate(line.after(number)):
        if place is None:
            text.append("·", "dim")
        elif place.status == "accepted":
            style = round_style(forwards[index], trace.num_forwards)
            text.append(_piece(trace, place), style + Style(bold=forwards[index] == number))
        elif place.status == "rejected":
            text.append(_piece(trace, place), "red strike")
        else:
            text.append(_piece(trace, place), "italic underline" if place.num_drafts > 1 else "italic")
    return Group(Text(_head(trace, line, number), "bold"), text, _legend())


def _legend() -> Text:
    parts: Sequence[tuple[str, str]] = (
        ("· masked", "dim"), ("drafted", "italic"), ("re-planned", "italic underline"), ("rejected", "red strike"),
    )  # fmt: skip
    legend = Text("background: accepted, by forward; ", "dim")
    for name, style in parts:
        legend.append(name, style)
        legend.append("  ")
    return legend


def _piece(trace: Trace, place: Change) -> str:
    return "?" if place.token is None else visible(trace.piece(place.token))
