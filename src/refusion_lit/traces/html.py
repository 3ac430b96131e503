"""The HTML page of a trace: one self-contained file; all text from the model is data, never markup."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from string import Template
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from refusion_lit.traces.document import FORMAT, Trace, explain, visible, visible_lines
from refusion_lit.traces.timeline import Change, timeline, trace_statistics


def page(trace: Trace) -> str:
    """Return the page.

    The content security policy allows exactly the page's own style and script, by hash, and forbids any request. All
    text of the trace is in one JSON block, which is escaped so that no text can end it; the script inserts it as text
    nodes only.
    """
    style = _asset("page.css")
    script = _asset("page.js")
    return Template(_asset("page.html")).substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        format=FORMAT,
        data=htmlsafe_json_dumps(_data(trace), separators=(",", ":"), allow_nan=False),
    )


def _asset(name: str) -> str:
    return files("refusion_lit.traces").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(trace: Trace) -> dict[str, Any]:
    """Return the values that ``page.js`` shows; each token text is stored once, in ``pieces``."""
    history = timeline(trace)
    pieces: dict[str, int] = {}

    def compact(change: Change) -> list[Any]:
        text = visible(trace.piece(change.token))
        probability = None if change.probability is None else round(change.probability, 4)
        piece = pieces.setdefault(text, len(pieces))
        return [change.index, piece, probability, change.status[0], change.num_drafts]

    rounds = [
        {
            "phase": visible(entry.phase),
            "shape": list(entry.shape),
            "num_scores": len(entry.scores),
            "lowest_score": round(min(entry.scores), 4) if entry.scores else None,
            "changes": [compact(change) for change in changes],
        }
        for entry, changes in zip(trace.rounds, history.changes, strict=True)
    ]
    return {
        "decoder": visible(trace.decoder),
        "prompt": visible_lines(trace.prompt),
        "response": visible_lines(trace.response),
        "finish_reason": visible(trace.finish_reason),
        "seconds": round(trace.seconds, 3),
        "slot_size": trace.slot_size,
        "canvas_length": history.canvas_length,
        "rounds": rounds,
        "pieces": list(pieces),
        "statistics": trace_statistics(trace),
        "phases": [[visible(phase), number, explain(phase)] for phase, number in trace.phases.items()],
    }
