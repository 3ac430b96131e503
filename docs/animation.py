"""Draws a decode of ReFusion as an animated SVG: python docs/animation.py.

The model is the half-trained one of the reference outputs, which makes mistakes, so that every kind of forward occurs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

import refusion_lit
from refusion_lit.decoding import ReFusion
from refusion_lit.traces.document import Trace, record_trace
from refusion_lit.traces.timeline import Change, timeline
from refusion_lit.types import SamplingParams

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-mid"
TARGET = ROOT / "docs" / "img" / "decode.svg"
QUERY = "95+17,48+64,33+29,70+55>"
SLOT_SIZE = 8
CELL, GAP, LEFT = 17, 5, 14
SECONDS, PAUSE = 1.3, 4.0  # per forward; after the last one
COLOURS = {"masked": "#ffffff", "drafted": "#ffe08a", "rejected": "#f3a6a0", "accepted": "#9fd3c7"}
PHASES = {
    "plan": "plan: draft the slots",
    "verify": "verify the drafts",
    "verify+plan": "verify the drafts, and plan the next round",
    "infill_propose": "infill: propose the rest of the chosen slots",
    "infill_verify+propose": "infill: verify the proposals, and propose again",
    "infill_verify": "infill: verify the proposals",
}
STYLE = """
.frame{visibility:hidden;animation-duration:%gs;animation-timing-function:step-end;animation-iteration-count:infinite}
%s
@media (prefers-reduced-motion:reduce){.frame{animation:none!important}.last{visibility:visible}}
"""


def decode() -> Trace:
    """Return the trace of the answer to the query."""
    model = refusion_lit.load(MODEL)
    decoder = ReFusion(slot_size=SLOT_SIZE, fused=True)  # counts do not depend on the machine
    _, trace = record_trace(model, QUERY, decoder, SamplingParams(max_new_tokens=40))
    return trace


def words(x: float, y: float, content: str, size: int = 12, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(content)}</text>'


def cell(index: int, y: float, kind: str, content: str) -> str:
    """Return the token at an index of the response; gaps separate slots."""
    x = LEFT + index * CELL + index // SLOT_SIZE * GAP
    dashes = ' stroke-dasharray="2 2"' if kind == "masked" else ""
    box = f'<rect x="{x}" y="{y}" width="{CELL}" height="22" fill="{COLOURS[kind]}" stroke="#666"{dashes}/>'
    return box + (words(x + CELL / 2, y + 15.5, content, 12, "middle") if content else "")


def frame(trace: Trace, states: list[Change | None], number: int) -> str:
    """Return what is known after a number of forwards: by ReFusion, and by one token per forward."""
    tokens = len(trace.token_ids)
    num_accepted = sum(state is not None and state.status == "accepted" for state in states[:tokens])
    title = "all masked" if number == 0 else PHASES[trace.rounds[number - 1].phase]
    parts = [words(LEFT, 52, f"forward {number}  ·  {num_accepted} of {tokens} tokens  ·  {title}", 13)]
    for index, state in enumerate(states[:tokens]):
        piece = "" if state is None or state.token is None else trace.piece(state.token).replace("<eos>", "⏎")
        parts.append(cell(index, 62, "masked" if state is None else state.status, piece))
    parts.append(words(LEFT, 112, f"one token per forward  ·  {number} of {tokens} tokens", 13))
    for index, token in enumerate(trace.token_ids):
        known = index < number
        parts.append(cell(index, 122, "accepted" if known else "masked", trace.piece(token) if known else ""))
    return "".join(parts)


def draw(trace: Trace) -> str:
    """Return the animation of a decode."""
    decoded = timeline(trace)
    num_frames = trace.num_forwards + 1
    seconds = num_frames * SECONDS + PAUSE
    rules, frames = [], []
    for number in range(num_frames):
        is_last = number == num_frames - 1
        start, end = (100 * SECONDS * i / seconds for i in (number, number + 1))
        steps = f"{start:.2f}%{{visibility:visible}}" + ("" if is_last else f"{end:.2f}%{{visibility:hidden}}")
        rules.append(f"@keyframes f{number}{{0%{{visibility:hidden}}{steps}}}.f{number}{{animation-name:f{number}}}")
        kind = f"frame f{number}{' last' if is_last else ''}"
        frames.append(f'<g class="{kind}">{frame(trace, decoded.after(number), number)}</g>\n')
    num_tokens = len(trace.token_ids)
    width = 2 * LEFT + num_tokens * CELL + (num_tokens - 1) // SLOT_SIZE * GAP
    legend = "dashed: mask  ·  yellow: draft  ·  red: rejected  ·  green: accepted  ·  gaps separate slots of 8 tokens"
    label = f"ReFusion decodes {num_tokens} tokens in {trace.num_forwards} forwards"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 176" role="img" aria-label="{label}" '
        f'font-family="ui-monospace, monospace"><style>{STYLE % (seconds, "".join(rules))}</style>'
        f'<rect width="{width}" height="176" fill="#fbfbfb"/>'
        + words(LEFT, 24, f"prompt  {trace.prompt}", 13)
        + "".join(frames)
        + words(LEFT, 166, legend, 11)
        + "</svg>\n"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    TARGET.write_text(draw(decode()), encoding="utf-8")
