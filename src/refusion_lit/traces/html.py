"""The HTML page of a trace: one file, no network, everything that a model wrote kept as data."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from string import Template
from typing import Any

from refusion_lit.traces.display import visible, visible_lines
from refusion_lit.traces.document import Trace
from refusion_lit.traces.summary import trace_statistics
from refusion_lit.traces.timeline import Change, timeline


def page(trace: Trace) -> str:
    """Return a self-contained HTML page.

    Style and script are the package's own files, allowed by their hashes in the page's content security policy;
    nothing else runs or loads. All text of prompt, model and trace lies in a JSON block that no character of it can
    leave, and the script puts it in place as text alone.
    """
    style, script = _asset("page.css"), _asset("page.js")
    return Template(_asset("page.html")).substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_embedded(_data(trace)),
    )


def _asset(name: str) -> str:
    return files("refusion_lit.traces").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(values: dict[str, Any]) -> str:
    r"""Return JSON in ASCII with none of HTML's characters: ``</script>`` becomes ``\u003c/script\u003e``."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(trace: Trace) -> dict[str, Any]:
    line = timeline(trace)
    pieces: dict[str, int] = {}

    def change(values: Change) -> list[Any]:
        text = "?" if values.token is None else visible(trace.piece(values.token))
        probability = None if values.probability is None else round(values.probability, 4)
        return [
            values.place, pieces.setdefault(text, len(pieces)), probability, values.status[0], values.num_drafts
        ]  # fmt: skip

    statistics = trace_statistics([trace])
    phases = [[visible(phase), number] for phase, number in statistics.forwards_by_phase.items()]
    rounds = [
        {
            "phase": visible(entry.phase),
            "shape": list(entry.shape),
            "num_scores": len(entry.scores),
            "lowest_score": round(min(entry.scores), 4) if entry.scores else None,
            "changes": [change(values) for values in changes],
        }
        for entry, changes in zip(trace.rounds, line.changes, strict=True)
    ]
    return {
        "decoder": visible(trace.decoder),
        "prompt": visible_lines(trace.prompt),
        "response": visible_lines(trace.response),
        "finish_reason": visible(trace.finish_reason),
        "seconds": round(trace.seconds, 3),
        "slot_size": trace.slot_size,
        "num_places": line.num_places,
        "num_tokens": len(trace.token_ids),
        "rounds": rounds,
        "pieces": list(pieces),
        "statistics": statistics.to_dict() | {"phases": phases},
    }
