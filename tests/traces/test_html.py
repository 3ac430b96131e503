"""The HTML page as a file: no text of the model leaves its JSON block."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from refusion_lit.traces.display import page
from refusion_lit.traces.document import explain_phase
from refusion_lit.traces.timeline import timeline
from support.parsed_page import ParsedPage
from traces.samples import entry, make_trace, plan_and_verify

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "a\u2028b\u2029c",
    "\x1b[2J\x00",
    "$data ${style} &lt;",
    "\u202etxt",
    "\ud800",
)


def hostile_page() -> str:
    pieces = dict(enumerate(HOSTILE, start=1))
    rounds = [entry(HOSTILE[0], {i: i + 1 for i in range(len(HOSTILE))}, range(len(HOSTILE)))]
    everything = "".join(HOSTILE)
    return page(make_trace(rounds, pieces=pieces, prompt=everything, response=everything))


def test_hostile_text_adds_no_element() -> None:
    assert ParsedPage(hostile_page()).markup == ParsedPage(page(plan_and_verify())).markup
    hostile_page().encode("utf-8")  # lone surrogates are escaped too
    assert "\u2028" not in hostile_page()


def test_the_policy_allows_exactly_the_style_and_the_script_of_the_page() -> None:
    actual = ParsedPage(hostile_page())
    [style], [_, script] = actual.contents("style"), actual.contents("script")
    for kind, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in actual.policy
    assert actual.policy.startswith("default-src 'none';")
    assert "unsafe" not in actual.policy


def test_the_page_refers_to_nothing_outside() -> None:
    assert not re.search(r"https?:|@import|url\(|\ssrc=|\shref=", page(plan_and_verify()))


def test_the_data_are_the_timeline() -> None:
    trace = plan_and_verify()
    data = json.loads(ParsedPage(page(trace)).contents("script")[0])
    for number, changes in enumerate(timeline(trace).changes):
        written = data["rounds"][number]["changes"]
        assert [(c[0], data["pieces"][c[1]], c[2], c[3], c[4]) for c in written] == [
            (c.index, trace.pieces[c.token or 0], c.probability, c.status[0], c.num_drafts) for c in changes
        ]
    assert data["phases"] == [[phase, 2, explain_phase(phase)] for phase in ("plan", "verify")]
