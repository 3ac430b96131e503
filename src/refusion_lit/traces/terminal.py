"""A trace in the terminal: an animation, or one plain line per forward if the output is not a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from refusion_lit.traces.document import Trace, explain, visible
from refusion_lit.traces.timeline import Change, Timeline, timeline, trace_statistics

# From blue over green to yellow: bright enough for black text, and ordered for all common kinds of colour blindness.
_RAMP = ((94, 160, 222), (68, 191, 112), (253, 231, 37))


def round_style(number: int, num_forwards: int) -> Style:
    """Return the colours of text that a forward accepted.

    Args:
        number: The forward's number, from 1.
        num_forwards: Number of forwards of the decode.
    """
    at = (number - 1) / max(num_forwards - 1, 1) * (len(_RAMP) - 1)
    below = min(int(at), len(_RAMP) - 2)
    ends = zip(_RAMP[below], _RAMP[below + 1], strict=True)
    red, green, blue = (round(low + (high - low) * (at - below)) for low, high in ends)
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")


def animate(
    trace: Trace,
    *,
    console: Console,
    seconds_per_forward: float = 0.4,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show a decode forward by forward; if the console is not a terminal, print all forwards as plain text at once.

    Args:
        trace: The decode.
        console: Where to show it.
        seconds_per_forward: Display time of a forward in seconds, at least 0.
        sleep: Waits for a number of seconds.
    """
    history = timeline(trace)
    if not console.is_terminal:
        lines = [f"decoder: {visible(trace.decoder)}", "(drafted) ~rejected~ · masked", *_explanations(trace)]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        for number in range(1, trace.num_forwards + 1):
            console.print(_plain(trace, history, number), markup=False, highlight=False, soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for number in range(trace.num_forwards + 1):
            live.update(_frame(trace, history, number), refresh=True)
            if number < trace.num_forwards:
                sleep(seconds_per_forward)


def print_statistics(trace: Trace, *, console: Console) -> None:
    """Print the statistics of a trace as a table."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    phases = Counter(entry.phase for entry in trace.rounds)
    rows = trace_statistics(trace) | {f"forwards: {visible(phase)}": str(count) for phase, count in phases.items()}
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console.print(table)


def _heading(trace: Trace, history: Timeline, number: int) -> str:
    if number == 0:
        return f"before the first of {trace.num_forwards} forwards"
    changes = history.changes[number - 1]
    statuses = [change.status for change in changes]
    counts = {name: statuses.count(name) for name in ("accepted", "drafted", "rejected")}
    counts["re-planned"] = sum(change.status == "drafted" and change.num_drafts > 1 for change in changes)
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    phase = visible(trace.rounds[number - 1].phase)
    return f"forward {number}/{trace.num_forwards}, {phase}: {shown or 'no token changes'}"


def _about(trace: Trace, number: int) -> str:
    """Return what a forward does; empty for a phase that is not explained."""
    if number == 0:
        return "Every token of the response is masked."
    does = explain(trace.rounds[number - 1].phase)
    return f"This forward {does}." if does else ""


def _explanations(trace: Trace) -> list[str]:
    """Return a line for each phase of a trace that says what its forwards do; of ``a+b`` one for ``a`` and ``b``."""
    phases = dict.fromkeys(phase for entry in trace.rounds for phase in entry.phase.split("+"))
    return [f"{visible(phase)}: {explain(phase)}" for phase in phases if explain(phase)]


def _plain(trace: Trace, history: Timeline, number: int) -> str:
    """Return one forward as text: accepted tokens as they are, drafts in (), rejected drafts in ~~, masks as dots."""
    marks = {"accepted": ("", ""), "drafted": ("(", ")"), "rejected": ("~", "~")}
    text = ""
    previous: str | None = None
    for change in history.after(number):
        status = None if change is None else change.status
        if status != previous:
            text += (marks[previous][1] if previous else "") + (marks[status][0] if status else "")
            previous = status
        text += "·" if change is None else _piece(trace, change)
    return f"{_heading(trace, history, number)}\n    {text}{marks[previous][1] if previous else ''}"


def _frame(trace: Trace, history: Timeline, number: int) -> Group:
    text = Text()
    forwards = history.final_forwards()
    for index, change in enumerate(history.after(number)):
        if change is None:
            text.append("·", "dim")
        elif change.status == "accepted":
            style = round_style(forwards[index], trace.num_forwards)
            text.append(_piece(trace, change), style + Style(bold=forwards[index] == number))
        elif change.status == "rejected":
            text.append(_piece(trace, change), "red strike")
        else:
            text.append(_piece(trace, change), "italic underline" if change.num_drafts > 1 else "italic")
    heading = f"{visible(trace.decoder)}, {_heading(trace, history, number)}"
    return Group(Text(heading, "bold"), Text(_about(trace, number), "dim"), text, _legend())


def _legend() -> Text:
    parts: Sequence[tuple[str, str]] = (
        ("· masked", "dim"), ("drafted", "italic"), ("re-planned", "italic underline"), ("rejected", "red strike"),
    )  # fmt: skip
    legend = Text("background: accepted, by forward; ", "dim")
    for name, style in parts:
        legend.append(name, style)
        legend.append("  ")
    return legend


def _piece(trace: Trace, change: Change) -> str:
    return "?" if change.token is None else visible(trace.piece(change.token))
