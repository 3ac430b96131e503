"""The HTML page of a trace in headless Chromium, offline, driven by keyboard and mouse."""

from __future__ import annotations

import pytest

from refusion_lit.traces.display import page
from refusion_lit.traces.document import Trace, explain_phase
from refusion_lit.traces.timeline import timeline
from support.browser import Chrome, Show, colours, contrast, js, press, resize, without_browser
from traces.samples import entry, make_trace, plan_and_verify, random_trace
from traces.test_html import HOSTILE, hostile_page

pytest.importorskip("selenium", reason="needs selenium: pip install --group test")
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = without_browser


def text(driver: Chrome, name: str) -> str:
    return js(driver, f"document.getElementById('{name}').textContent")


def classes(driver: Chrome) -> list[set[str]]:
    """Return the CSS classes of every token except ``slot`` and ``beyond``."""
    names = js(driver, "[...document.querySelectorAll('#text .token')].map(e => e.className)")
    return [set(name.split()) - {"token", "slot", "beyond"} for name in names]


def expected_places(trace: Trace, forwards: int) -> list[set[str]]:
    history = timeline(trace)
    final = history.final_forwards()
    places: list[set[str]] = []
    for index, change in enumerate(history.after(forwards)):
        if change is None:
            places.append({"masked"})
        elif change.status == "accepted":
            places.append({"accepted", "new"} if final[index] == forwards else {"accepted"})
        else:
            places.append({change.status, "again"} if change.num_drafts > 1 else {str(change.status)})
    return places


@pytest.mark.parametrize("trace", [plan_and_verify(), random_trace(3), random_trace(8)])
def test_arrow_keys_step_through_every_forward(show: Show, trace: Trace) -> None:
    driver = show(page(trace))
    assert classes(driver) == expected_places(trace, trace.num_forwards)  # the page opens with the whole text
    press(driver, Keys.HOME)
    assert classes(driver) == expected_places(trace, 0)
    for forwards in range(1, trace.num_forwards + 1):
        press(driver, Keys.ARROW_RIGHT)
        assert classes(driver) == expected_places(trace, forwards)
        phase = trace.rounds[forwards - 1].phase
        assert f"Forward {forwards} of {trace.num_forwards}, {phase}" in text(driver, "status")
    press(driver, Keys.ARROW_RIGHT)  # after the last forward: no effect
    press(driver, Keys.ARROW_LEFT)
    assert classes(driver) == expected_places(trace, trace.num_forwards - 1)
    press(driver, Keys.END)
    assert js(driver, "document.getElementById('slider').value") == str(trace.num_forwards)


def test_the_slider_moves_and_announces_its_forward(show: Show) -> None:
    trace = plan_and_verify()
    driver = show(page(trace))
    slider = driver.find_element(By.ID, "slider")
    slider.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert classes(driver) == expected_places(trace, 2)
    assert slider.get_attribute("aria-valuetext") == "forward 2, verify"


def test_space_plays_from_the_start_to_the_end(show: Show) -> None:
    trace = plan_and_verify()
    driver = show(page(trace))
    play = driver.find_element(By.ID, "play")
    press(driver, Keys.SPACE)
    assert play.get_attribute("aria-pressed") == "true"
    assert classes(driver) == expected_places(trace, 0)
    WebDriverWait(driver, 60).until(lambda _: play.get_attribute("aria-pressed") == "false")
    assert classes(driver) == expected_places(trace, 4)


def test_hover_and_focus_show_the_probability_of_a_token(show: Show) -> None:
    driver = show(page(plan_and_verify()))
    press(driver, Keys.END)
    ActionChains(driver).move_to_element(driver.find_element(By.CSS_SELECTOR, "[data-index='2']")).perform()
    assert text(driver, "detail") == "token 3, slot 2: “c” accepted by forward 2, probability 52.0 %"
    driver.execute_script("document.querySelector('[data-index=\"0\"]').focus()")
    press(driver, Keys.ARROW_RIGHT, shift=True)
    assert text(driver, "detail") == "token 2, slot 1: “b” accepted by forward 4, probability 51.0 %, drafted 2 times"
    for forward, shown in ((3, "drafted by forward 3"), (2, "rejected by forward 2")):
        press(driver, Keys.ARROW_LEFT)
        assert shown in text(driver, "detail"), forward
    assert js(driver, "document.activeElement.getAttribute('aria-label')") == text(driver, "detail")


def test_every_control_is_reached_by_tab_and_has_a_name(show: Show) -> None:
    driver = show(page(plan_and_verify()))
    reached = []
    for _ in range(9):
        press(driver, Keys.TAB)
        reached.append(js(driver, "document.activeElement.id || document.activeElement.dataset.index"))
    assert reached == ["prompt", "first", "back", "play", "next", "last", "slider", "0", "response"]
    assert js(driver, "[...document.querySelectorAll('button, input')].every(e => e.getAttribute('aria-label'))")


def test_states_differ_without_colour_and_forwards_by_colour_and_number(show: Show) -> None:
    driver = show(page(plan_and_verify()))
    looks = set()
    for forwards, index in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 2)):
        press(driver, Keys.HOME)
        for _ in range(forwards):
            press(driver, Keys.ARROW_RIGHT)
        cell = driver.find_element(By.CSS_SELECTOR, f"[data-index='{index}']")
        names = ("border-style", "border-width", "background-image", "font-weight")
        looks.add(tuple(cell.value_of_css_property(name) for name in names))
    assert len(looks) == 6
    first, third = (driver.find_element(By.CSS_SELECTOR, f"[data-index='{index}']") for index in (0, 2))
    assert first.value_of_css_property("background-color") != third.value_of_css_property("background-color")
    assert third.get_attribute("data-forward") == "2"


def test_accepted_tokens_are_readable_and_stand_out_from_the_page(show: Show) -> None:
    driver = show(page(make_trace([entry("step", {i: 1}, [i]) for i in range(40)], token_ids=[1] * 40)))
    press(driver, Keys.END)
    for scheme, minimum in (("light", 1.5), ("dark", 2.5)):
        resize(driver, 1200, scheme)
        texts, fills = (colours(driver, "#text .accepted", name) for name in ("color", "backgroundColor"))
        (card,) = colours(driver, ".stage", "backgroundColor")
        assert len(set(fills)) == 40
        assert min(map(contrast, texts, fills)) >= 4.5
        assert min(contrast(fill, card) for fill in fills) >= minimum
        assert min(max(fill) - min(fill) for fill in fills) >= 60  # no grey: it would look like a mask


def test_hostile_text_is_shown_and_never_executed(show: Show) -> None:
    driver = show(hostile_page())
    press(driver, Keys.END)
    assert js(driver, "document.querySelectorAll('img, #text script').length") == 0
    shown = js(driver, "[...document.querySelectorAll('#text .token')].map(e => e.textContent)")
    assert shown[0] == HOSTILE[0]
    assert shown[3] == "a\ufffdb\ufffdc"
    assert shown[6] == "\ufffdtxt"
    assert HOSTILE[0] in text(driver, "prompt")
    assert HOSTILE[2] in text(driver, "response")


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(show: Show, width: int, scheme: str) -> None:
    pieces = {1: "x" * 300, 2: "\n"}
    long = make_trace([entry("p" * 60, {0: 1, 1: 2}, [0, 1])], token_ids=(1, 2), pieces=pieces, prompt="y" * 500)
    for trace in (plan_and_verify(), long):
        driver = show(page(trace))
        press(driver, Keys.END)
        resize(driver, width, scheme)
        assert js(driver, "document.documentElement.scrollWidth") <= width


LINES = "[...document.querySelectorAll('#text .token')].map(e => Math.round(e.getBoundingClientRect().top))"


@pytest.mark.parametrize("width", [400, 700, 1200])
def test_slots_do_not_break_across_lines(show: Show, width: int) -> None:
    pieces = {token: "x" * (1 + token % 5) for token in range(1, 11)}
    drafts = {index: 1 + index * 7 % 10 for index in range(96)}
    trace = make_trace([entry("plan", drafts, range(96))], token_ids=[*drafts.values()], slot_size=4, pieces=pieces)
    driver = show(page(trace))
    resize(driver, width)
    for key in (Keys.HOME, Keys.END):
        press(driver, key)
        tops = js(driver, LINES)
        assert all(len(set(tops[start : start + 4])) == 1 for start in range(0, 96, 4))
        assert len(set(tops)) > 1


def test_a_line_ends_where_the_text_of_a_slot_ends_one(show: Show) -> None:
    pieces = {1: "a", 2: "\n"}
    drafts = {0: 1, 1: 2, 2: 1, 3: 2, 4: 1, 5: 1}
    trace = make_trace([entry("plan", drafts, range(6))], token_ids=[*drafts.values()], slot_size=4, pieces=pieces)
    driver = show(page(trace))
    press(driver, Keys.END)
    tops = js(driver, LINES)
    assert [tops.count(top) for top in sorted(set(tops))] == [2, 2, 2]


def test_phases_are_explained(show: Show) -> None:
    driver = show(page(plan_and_verify()))
    press(driver, Keys.HOME)
    assert text(driver, "phase") == "Every token of the response is masked."
    press(driver, Keys.ARROW_RIGHT)
    assert text(driver, "phase") == f"This forward {explain_phase('plan')}."
    rows = js(driver, "[...document.querySelectorAll('#phases tr')].map(r => [...r.children].map(c => c.textContent))")
    assert rows == [[phase, explain_phase(phase), "2"] for phase in ("plan", "verify")]
    unknown = show(page(make_trace([entry("guess", {0: 1}, [0])], token_ids=[1])))
    press(unknown, Keys.END)
    assert text(unknown, "phase") == ""


def test_an_empty_trace_opens(show: Show) -> None:
    driver = show(page(make_trace([])))
    press(driver, Keys.ARROW_RIGHT)
    assert text(driver, "status").startswith("Before the first of 0 forwards")
