"""The HTML page in a real browser, without network, by keyboard and mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from refusion_lit.traces import Trace, page, timeline
from traces.browser import CHROMIUM, Browser
from traces.samples import entry, make_trace, plan_and_verify, random_trace
from traces.test_html import HOSTILE, hostile_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def show(browser: Browser, text: str, folder: Path) -> None:
    path = folder / "trace.html"
    path.write_text(text, encoding="utf-8")
    browser.screen(1200)
    browser.open(path)
    assert browser.complaints == []


def classes(browser: Browser) -> list[set[str]]:
    """Return the classes of every token but ``slot`` and ``beyond``."""
    names = browser.js("[...document.querySelectorAll('#text .token')].map(e => e.className)")
    return [set(name.split()) - {"token", "slot", "beyond"} for name in names]


def expected(trace: Trace, forwards: int) -> list[set[str]]:
    line = timeline(trace)
    final = line.final_forwards()
    found: list[set[str]] = []
    for place, change in enumerate(line.after(forwards)):
        if change is None:
            found.append({"masked"})
        elif change.status == "accepted":
            found.append({"accepted", "new"} if final[place] == forwards else {"accepted"})
        else:
            found.append({change.status, "again"} if change.num_drafts > 1 else {str(change.status)})
    return found


def text(browser: Browser, name: str) -> str:
    return browser.js(f"document.getElementById('{name}').textContent")


@pytest.mark.parametrize("trace", [plan_and_verify(), random_trace(3), random_trace(8)])
def test_arrow_keys_step_through_every_forward(browser: Browser, tmp_path: Path, trace: Trace) -> None:
    show(browser, page(trace), tmp_path)
    assert classes(browser) == expected(trace, trace.num_forwards)
    browser.key("Home")
    assert classes(browser) == expected(trace, 0)
    for forwards in range(1, trace.num_forwards + 1):
        browser.key("ArrowRight")
        assert classes(browser) == expected(trace, forwards)
        assert f"Forward {forwards} of {trace.num_forwards}, {trace.rounds[forwards - 1].phase}" in text(
            browser, "status"
        )
    browser.key("ArrowRight")  # there is no further one
    browser.key("ArrowLeft")
    assert classes(browser) == expected(trace, trace.num_forwards - 1)
    browser.key("End")
    assert browser.js("document.getElementById('slider').value") == str(trace.num_forwards)


def test_the_slider_moves_and_says_where_it_is(browser: Browser, tmp_path: Path) -> None:
    trace = plan_and_verify()
    show(browser, page(trace), tmp_path)
    slider = "document.getElementById('slider')"
    browser.js(f"{slider}.value = 2; {slider}.dispatchEvent(new Event('input'))")
    assert classes(browser) == expected(trace, 2)
    assert browser.js(f"{slider}.getAttribute('aria-valuetext')") == "forward 2, verify"


def test_space_plays_from_the_start_to_the_end(browser: Browser, tmp_path: Path) -> None:
    trace = plan_and_verify()
    show(browser, page(trace), tmp_path)
    browser.key(" ")
    assert browser.js("document.getElementById('play').getAttribute('aria-pressed')") == "true"
    assert classes(browser) == expected(trace, 0)
    pressed = "document.getElementById('play').getAttribute('aria-pressed')"
    ended = f"new Promise(done => setInterval(() => {{ if ({pressed} === 'false') done(true); }}, 50))"
    assert browser.js(ended)
    assert classes(browser) == expected(trace, 4)


def test_certainty_is_told_on_hover_and_on_focus(browser: Browser, tmp_path: Path) -> None:
    show(browser, page(plan_and_verify()), tmp_path)
    browser.point_at("[data-place='2']")
    assert text(browser, "detail") == "place 3, slot 2: “c” accepted by forward 2, certainty 52.0 %"
    browser.js("document.querySelector('[data-place=\"0\"]').focus()")
    browser.key("ArrowRight", shift=True)
    assert text(browser, "detail") == "place 2, slot 1: “b” accepted by forward 4, certainty 51.0 %, drafted 2 times"
    for forward, told in ((3, "drafted by forward 3"), (2, "rejected by forward 2")):
        browser.key("ArrowLeft")
        assert told in text(browser, "detail"), forward
    assert browser.js("document.activeElement.getAttribute('aria-label')") == text(browser, "detail")


def test_every_control_is_reached_by_tab_and_has_a_name(browser: Browser, tmp_path: Path) -> None:
    show(browser, page(plan_and_verify()), tmp_path)
    reached = []
    for _ in range(9):
        browser.key("Tab")
        reached.append(browser.js("document.activeElement.id || document.activeElement.dataset.place"))
    assert reached == ["prompt", "first", "back", "play", "next", "last", "slider", "0", "response"]
    assert browser.js("[...document.querySelectorAll('button, input')].every(e => e.getAttribute('aria-label'))")


def test_states_differ_by_border_or_pattern_and_rounds_by_colour_and_number(browser: Browser, tmp_path: Path) -> None:
    trace = plan_and_verify()
    show(browser, page(trace), tmp_path)
    looks = set()
    for forwards, place in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 2)):
        browser.key("Home")
        for _ in range(forwards):
            browser.key("ArrowRight")
        style = f"getComputedStyle(document.querySelector('[data-place=\"{place}\"]'))"
        looks.add(
            tuple(browser.js(f"['borderStyle', 'borderWidth', 'backgroundImage', 'fontWeight'].map(n => {style}[n])"))
        )
    assert len(looks) == 6
    background = "getComputedStyle(document.querySelector('[data-place=\"{}\"]')).backgroundColor"
    assert browser.js(background.format(0)) != browser.js(background.format(2))
    assert browser.js("document.querySelector('[data-place=\"2\"]').dataset.forward") == "2"


def test_contrast_of_accepted_tokens_is_enough(browser: Browser, tmp_path: Path) -> None:
    trace = make_trace([entry("step", {i: 1}, [i]) for i in range(40)], token_ids=[1] * 40)
    show(browser, page(trace), tmp_path)
    pairs = browser.js(
        "[...document.querySelectorAll('#text .accepted')].map(e => [getComputedStyle(e).color, "
        "getComputedStyle(e).backgroundColor].map(c => c.match(/\\d+/g).slice(0, 3).map(Number)))"
    )

    def light(rgb: list[int]) -> float:
        linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    assert len(pairs) == 40
    assert min(max(map(light, pair)) / min(map(light, pair)) for pair in pairs) >= 4.5


def test_hostile_text_is_shown_and_nothing_of_it_runs(browser: Browser, tmp_path: Path) -> None:
    show(browser, hostile_page(), tmp_path)
    assert browser.js("document.querySelectorAll('img, #text script').length") == 0
    shown = browser.js("[...document.querySelectorAll('#text .token')].map(e => e.textContent)")
    assert shown[0] == HOSTILE[0]
    assert shown[3] == "a\ufffdb\ufffdc"
    assert shown[6] == "\ufffdtxt"
    assert HOSTILE[0] in text(browser, "prompt")
    assert HOSTILE[2] in text(browser, "response")


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    pieces = {1: "x" * 300, 2: "\n"}
    long = make_trace([entry("p" * 60, {0: 1, 1: 2}, [0, 1])], token_ids=(1, 2), pieces=pieces, prompt="y" * 500)
    for trace in (plan_and_verify(), long):
        show(browser, page(trace), tmp_path)
        browser.screen(width, scheme=scheme)
        assert browser.js("document.documentElement.scrollWidth") <= width


def test_an_empty_trace_opens(browser: Browser, tmp_path: Path) -> None:
    show(browser, page(make_trace([])), tmp_path)
    browser.key("ArrowRight")
    assert text(browser, "status").startswith("Before the first of 0 forwards")
