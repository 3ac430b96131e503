"""Viewers for traces: an animation and a statistics table in the terminal, and a self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable
from importlib.resources import files
from string import Template
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from rich.color import Color, ColorTriplet, blend_rgb
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from refusion_lit.traces.document import FORMAT, Trace, explain_phase, show_controls, show_controls_in_lines
from refusion_lit.traces.timeline import Change, Timeline, timeline, trace_statistics

_SECONDS_PER_FORWARD = 0.4
# From blue over green to yellow: bright enough for black text, and ordered for all common colour blindness.
_RAMP = (ColorTriplet(94, 160, 222), ColorTriplet(68, 191, 112), ColorTriplet(253, 231, 37))
_LEGEND = Text.assemble(
    ("background: accepted, by forward; · masked", "dim"), "  ", ("drafted", "italic"), "  ",
    ("re-planned", "italic underline"), "  ", ("rejected", "red strike"),
)  # fmt: skip


def round_style(number: int, num_forwards: int) -> Style:
    """Return the colours for tokens that a forward accepted.

    Args:
        number: The forward's number, from 1.
        num_forwards: Number of forwards in the decode.
    """
    at = (number - 1) / max(num_forwards - 1, 1) * (len(_RAMP) - 1)
    below = min(int(at), len(_RAMP) - 2)
    shade = blend_rgb(_RAMP[below], _RAMP[below + 1], at - below)
    return Style(color="black", bgcolor=Color.from_triplet(shade))


def animate(trace: Trace, *, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a decode forward by forward on a terminal; print nothing elsewhere.

    Args:
        trace: The decode.
        console: The terminal.
        sleep: Function that waits for some seconds.
    """
    if not console.is_terminal:
        return
    history = timeline(trace)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for number in range(trace.num_forwards + 1):
            live.update(_frame(trace, history, number), refresh=True)
            if number < trace.num_forwards:
                sleep(_SECONDS_PER_FORWARD)


def print_statistics(trace: Trace, *, console: Console) -> None:
    """Print a trace's statistics as a table."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    phases = {f"forwards: {show_controls(phase)}": str(count) for phase, count in trace.phases.items()}
    rows = trace_statistics(trace) | phases
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
    phase = show_controls(trace.rounds[number - 1].phase)
    return f"forward {number}/{trace.num_forwards}, {phase}: {shown or 'no token changes'}"


def _frame(trace: Trace, history: Timeline, number: int) -> Group:
    """Return the terminal's picture of the response after a number of forwards."""
    text = Text()
    forwards = history.final_forwards()
    for index, change in enumerate(history.after(number)):
        style: Style | str = "italic"
        if change is None:
            style = "dim"
        elif change.status == "accepted":
            style = round_style(forwards[index], trace.num_forwards) + Style(bold=forwards[index] == number)
        elif change.status == "rejected":
            style = "red strike"
        elif change.num_drafts > 1:
            style = "italic underline"
        text.append("·" if change is None else show_controls(trace.piece(change.token)), style)
    heading = f"{show_controls(trace.decoder)}, {_heading(trace, history, number)}"
    about = "Every token of the response is masked."
    if number:
        explanation = explain_phase(trace.rounds[number - 1].phase)
        about = f"This forward {explanation}." if explanation else ""  # users' decoders may name other phases
    return Group(Text(heading, "bold"), Text(about, "dim"), text, _LEGEND)


def page(trace: Trace) -> str:
    """Return the HTML page, a single file in which text from the model is data, never markup.

    The content security policy allows the page's style and script by their hashes, and forbids all requests. The
    trace's text is in a JSON block, escaped so that no text can end the block; the script inserts text nodes only.
    """
    style = _asset("page.css")
    script = _asset("page.js")
    return Template(_asset("page.html")).substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        format=FORMAT,
        data=htmlsafe_json_dumps(_page_values(trace), separators=(",", ":"), allow_nan=False),
    )


def _asset(name: str) -> str:
    return files("refusion_lit.traces").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_values(trace: Trace) -> dict[str, Any]:
    """Return the values that ``page.js`` shows. ``pieces`` stores every token text once; changes refer to its index."""
    history = timeline(trace)
    pieces: dict[str, int] = {}

    def compact(change: Change) -> list[Any]:
        text = show_controls(trace.piece(change.token))
        probability = None if change.probability is None else round(change.probability, 4)
        piece = pieces.setdefault(text, len(pieces))
        return [change.index, piece, probability, change.status[0], change.num_drafts]

    rounds = [
        {
            "phase": show_controls(entry.phase),
            "shape": list(entry.shape),
            "num_scores": len(entry.scores),
            "lowest_score": round(min(entry.scores), 4) if entry.scores else None,
            "changes": [compact(change) for change in changes],
        }
        for entry, changes in zip(trace.rounds, history.changes, strict=True)
    ]
    return {
        "decoder": show_controls(trace.decoder),
        "prompt": show_controls_in_lines(trace.prompt),
        "response": show_controls_in_lines(trace.response),
        "finish_reason": show_controls(trace.finish_reason),
        "seconds": round(trace.seconds, 3),
        "slot_size": trace.slot_size,
        "canvas_length": history.canvas_length,
        "rounds": rounds,
        "pieces": list(pieces),
        "statistics": trace_statistics(trace),
        "phases": [[show_controls(phase), number, explain_phase(phase)] for phase, number in trace.phases.items()],
    }
