"""The HTML page of a trace in headless Chromium, offline, driven by keyboard and mouse."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from refusion_lit.traces import Trace, page, timeline
from traces.samples import entry, make_trace, plan_and_verify, random_trace
from traces.test_html import HOSTILE, hostile_page

pytest.importorskip("selenium", reason="needs selenium: pip install -e '.[dev]'")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    None in (CHROMIUM, DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

Show = Callable[[str], Chrome]


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService(DRIVER))
    driver.set_network_conditions(offline=True, latency=0, throughput=0)
    yield driver
    driver.quit()


@pytest.fixture
def show(chrome: Chrome, tmp_path: Path) -> Show:
    """Return a function that opens a page and checks that it loads nothing and logs nothing to the console."""

    def open_page(html: str) -> Chrome:
        path = tmp_path / "trace.html"
        path.write_text(html, encoding="utf-8")
        resize(chrome, 1200)
        chrome.get(path.as_uri())
        assert chrome.get_log("browser") == []
        assert js(chrome, "performance.getEntriesByType('resource').length") == 0
        return chrome

    return open_page


def js(driver: Chrome, expression: str) -> Any:
    return driver.execute_script(f"return {expression}")


def press(driver: Chrome, key: str, *, shift: bool = False) -> None:
    actions = ActionChains(driver, duration=0)
    if shift:
        actions.key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()
    else:
        actions.send_keys(key).perform()


def resize(driver: Chrome, width: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def text(driver: Chrome, name: str) -> str:
    return js(driver, f"document.getElementById('{name}').textContent")


def classes(driver: Chrome) -> list[set[str]]:
    """Return the CSS classes of every token except ``slot`` and ``beyond``."""
    names = js(driver, "[...document.querySelectorAll('#text .token')].map(e => e.className)")
    return [set(name.split()) - {"token", "slot", "beyond"} for name in names]


def expected(trace: Trace, forwards: int) -> list[set[str]]:
    history = timeline(trace)
    final = history.final_forwards()
    found: list[set[str]] = []
    for index, change in enumerate(history.after(forwards)):
        if change is None:
            found.append({"masked"})
        elif change.status == "accepted":
            found.append({"accepted", "new"} if final[index] == forwards else {"accepted"})
        else:
            found.append({change.status, "again"} if change.num_drafts > 1 else {str(change.status)})
    return found


@pytest.mark.parametrize("trace", [plan_and_verify(), random_trace(3), random_trace(8)])
def test_arrow_keys_step_through_every_forward(show: Show, trace: Trace) -> None:
    driver = show(page(trace))
    assert classes(driver) == expected(trace, trace.num_forwards)
    press(driver, Keys.HOME)
    assert classes(driver) == expected(trace, 0)
    for forwards in range(1, trace.num_forwards + 1):
        press(driver, Keys.ARROW_RIGHT)
        assert classes(driver) == expected(trace, forwards)
        phase = trace.rounds[forwards - 1].phase
        assert f"Forward {forwards} of {trace.num_forwards}, {phase}" in text(driver, "status")
    press(driver, Keys.ARROW_RIGHT)  # after the last forward: no effect
    press(driver, Keys.ARROW_LEFT)
    assert classes(driver) == expected(trace, trace.num_forwards - 1)
    press(driver, Keys.END)
    assert js(driver, "document.getElementById('slider').value") == str(trace.num_forwards)


def test_the_slider_moves_and_announces_its_forward(show: Show) -> None:
    trace = plan_and_verify()
    driver = show(page(trace))
    slider = driver.find_element(By.ID, "slider")
    slider.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert classes(driver) == expected(trace, 2)
    assert slider.get_attribute("aria-valuetext") == "forward 2, verify"


def test_space_plays_from_the_start_to_the_end(show: Show) -> None:
    trace = plan_and_verify()
    driver = show(page(trace))
    play = driver.find_element(By.ID, "play")
    press(driver, Keys.SPACE)
    assert play.get_attribute("aria-pressed") == "true"
    assert classes(driver) == expected(trace, 0)
    WebDriverWait(driver, 60).until(lambda _: play.get_attribute("aria-pressed") == "false")
    assert classes(driver) == expected(trace, 4)


def test_hover_and_focus_show_the_probability_of_a_token(show: Show) -> None:
    driver = show(page(plan_and_verify()))
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


def test_contrast_of_accepted_tokens_meets_wcag_aa(show: Show) -> None:
    driver = show(page(make_trace([entry("step", {i: 1}, [i]) for i in range(40)], token_ids=[1] * 40)))
    pairs = js(
        driver,
        "[...document.querySelectorAll('#text .accepted')].map(e => [getComputedStyle(e).color, "
        "getComputedStyle(e).backgroundColor].map(c => c.match(/\\d+/g).slice(0, 3).map(Number)))",
    )

    def luminance(rgb: list[int]) -> float:
        linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    assert len(pairs) == 40
    assert min(max(map(luminance, pair)) / min(map(luminance, pair)) for pair in pairs) >= 4.5


def test_hostile_text_is_shown_and_never_executed(show: Show) -> None:
    driver = show(hostile_page())
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
        resize(driver, width, scheme)
        assert js(driver, "document.documentElement.scrollWidth") <= width


def test_an_empty_trace_opens(show: Show) -> None:
    driver = show(page(make_trace([])))
    press(driver, Keys.ARROW_RIGHT)
    assert text(driver, "status").startswith("Before the first of 0 forwards")
