"""The HTML page as a file: nothing of a model's text gets out of its JSON block."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from refusion_lit.traces import page, timeline
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


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and self.lasttag == self.tags[-1][0] and data.strip():
            self.scripts.append(data)


def parsed(text: str) -> _Elements:
    elements = _Elements()
    elements.feed(text)
    return elements


def hostile_page() -> str:
    pieces = dict(enumerate(HOSTILE, start=1))
    rounds = [entry(HOSTILE[0], {i: i + 1 for i in range(len(HOSTILE))}, range(len(HOSTILE)))]
    everything = "".join(HOSTILE)
    return page(make_trace(rounds, pieces=pieces, prompt=everything, response=everything))


def test_hostile_text_adds_no_element() -> None:
    def shape(text: str) -> list[str]:
        return [tag for tag, _ in parsed(text).tags]

    assert shape(hostile_page()) == shape(page(plan_and_verify()))
    hostile_page().encode("utf-8")  # half a surrogate pair has been escaped too
    assert "\u2028" not in hostile_page()


def test_the_policy_names_exactly_the_style_and_the_script_of_the_page() -> None:
    found = parsed(hostile_page())
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    style, _, script = found.scripts
    for kind, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_the_page_refers_to_nothing_outside() -> None:
    assert not re.search(r"https?:|@import|url\(|\ssrc=|\shref=", page(plan_and_verify()))


def test_the_data_are_the_timeline() -> None:
    trace = plan_and_verify()
    data = json.loads(parsed(page(trace)).scripts[1])
    for number, changes in enumerate(timeline(trace).changes):
        written = data["rounds"][number]["changes"]
        assert [(c[0], data["pieces"][c[1]], c[2], c[3], c[4]) for c in written] == [
            (c.place, trace.pieces[c.token or 0], c.probability, c.status[0], c.num_drafts) for c in changes
        ]
    assert data["statistics"]["phases"] == [["plan", 2], ["verify", 2]]
