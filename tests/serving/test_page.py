"""The page in Chromium: a chat with the decode as it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")
pytest.importorskip("selenium", reason="needs selenium: pip install --group test")

from refusion_lit import load
from refusion_lit.data.tokenizers import alphabet
from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.serving.app import Server
from refusion_lit.text_model import TextModel
from support import browser
from support.servers import address, serving, slow, wait_for
from support.tiny import make_bytes_base

SCHEMES = ("light", "dark")
LAST = "[...document.querySelectorAll('article')].pop().getBoundingClientRect().bottom"
FORM = "document.getElementById('form').getBoundingClientRect().top"
pytestmark = browser.without_browser


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Chrome]:
    """A browser of its own, as this one reaches the server."""
    for driver in browser.start(tmp_path_factory.mktemp("profile")):
        driver.delete_network_conditions()
        yield driver


def ask(chrome: Any, text: str) -> None:
    from selenium.webdriver.common.by import By

    chrome.find_element(By.ID, "text").send_keys(text + "\n")


def is_done(chrome: Any) -> bool:
    return not browser.js(chrome, "document.getElementById('send').disabled")


TAKE = """
const canvas = new Canvas(document.createElement("div"));
const states = () => canvas.places.map((place) => place.text + ":" + place.state);
const found = [];
for (const round of arguments[0]) {
  canvas.take({ slot_size: 4, rounds: [{ drafted: [], texts: [], verified: [], committed: [], ...round }] });
  found.push(states());
}
return [...found, canvas.forwards];
"""


def test_a_token_is_shown_as_verified_once_a_verification_has_scored_it(chrome: Any, model: TextModel) -> None:
    with serving(model) as server:
        chrome.get(address(server))
        rounds = [
            {"drafted": [0, 1, 2], "texts": ["a", "b", "c"]},
            {"drafted": [2], "texts": ["d"]},  # drafted again, not verified
            {"verified": [1, 2], "drafted": [3], "texts": ["e"]},
            {"drafted": [2], "texts": ["f"]},  # rejected
            {"verified": [2], "committed": [0, 1, 2]},
            {"verified": [3], "drafted": [2], "texts": ["g"]},  # a committed one stays
        ]
        assert chrome.execute_script(TAKE, rounds) == [
            ["a:draft", "b:draft", "c:draft"],
            ["a:draft", "b:draft", "d:draft"],
            ["a:draft", "b:verified", "d:verified", "e:draft"],
            ["a:draft", "b:verified", "f:draft", "e:draft"],
            ["a:new", "b:new", "f:new", "e:draft"],
            ["a:new", "b:new", "f:new", "e:verified"],
            6,
        ]
        assert "scored by a verification" in browser.js(chrome, "document.querySelector('.legend').innerText")


def test_the_stop_button_stops(chrome: Any, model: TextModel) -> None:
    from selenium.webdriver.common.by import By

    with serving(model, ReFusion(slot_size=4), prepare=lambda worker: slow(worker, 0.05)) as server:
        chrome.get(address(server))
        wait_for(lambda: browser.js(chrome, "document.getElementById('model').textContent") == "additions")
        button = chrome.find_element(By.ID, "stop")
        assert not button.is_enabled()
        browser.js(chrome, "document.getElementById('max_tokens').value = 400")
        ask(chrome, "1+1")
        wait_for(lambda: len(server.worker.active) == 1)
        button.click()
        wait_for(lambda: not server.worker.active)
        wait_for(lambda: is_done(chrome))
        assert "stopped" in browser.js(chrome, "document.getElementById('status').textContent")
        assert not button.is_enabled()


DECODER = ReFusion(slot_size=4, num_serial_blocks=2)


@contextmanager
def opened(chrome: Any, model: TextModel, **options: Any) -> Iterator[Server]:
    """Open the page of a slow server on a phone."""
    with serving(model, DECODER, prepare=lambda worker: slow(worker, 0.05), **options) as server:
        browser.resize(chrome, 360)
        chrome.get(address(server))
        wait_for(lambda: browser.js(chrome, "document.getElementById('model').textContent") == "additions")
        yield server


def set_max_tokens(chrome: Any, number: int) -> None:
    browser.js(chrome, f"document.getElementById('max_tokens').value = {number}")


def status(chrome: Any) -> str:
    return browser.js(chrome, "document.getElementById('status').textContent")


def test_the_page_before_the_first_question(chrome: Any, model: TextModel) -> None:
    with opened(chrome, model):
        assert browser.js(chrome, "document.activeElement.id") == "text"
        assert "ReFusion" in browser.js(chrome, "document.getElementById('decoder').textContent")
        assert alphabet(model.tokenizer) in status(chrome)
        assert not browser.js(chrome, "document.getElementById('legend').offsetParent")  # nothing to explain yet
        assert browser.js(chrome, "document.documentElement.scrollWidth") <= 360, "a phone's width"
        assert browser.js(chrome, "[...document.querySelectorAll('input,textarea')].every(e => e.labels.length)")


def test_an_answer_is_shown_while_it_is_decoded_and_with_its_figures(
    chrome: Any, model: TextModel, tmp_path: Path
) -> None:
    row = model.generate(["1+1"], decoder=DECODER, max_new_tokens=24)[0]
    with opened(chrome, model):
        set_max_tokens(chrome, 24)
        ask(chrome, "1+1")
        for state in ("draft", "verified", "new"):
            selector = f".canvas .token.{state}"
            wait_for(lambda selector=selector: browser.js(chrome, f"document.querySelectorAll('{selector}').length"))
        assert browser.js(chrome, "document.querySelectorAll('.canvas .slot').length") >= 2
        chrome.save_screenshot(str(tmp_path / "phone.png"))
        wait_for(lambda: is_done(chrome))
        assert browser.js(chrome, "document.querySelector('article.assistant div').textContent") == row.text
        assert f"{row.num_tokens} tokens, {row.num_forwards} forwards" in status(chrome)
        ask(chrome, "1+1")  # this model has no chat template, so that the second question stands alone, too
        wait_for(lambda: is_done(chrome))
        texts = browser.js(chrome, "[...document.querySelectorAll('article.assistant div')].map(e => e.textContent)")
        assert texts == [row.text] * 2


def test_a_refused_question_is_told_in_the_status(chrome: Any, model: TextModel) -> None:
    with opened(chrome, model):
        set_max_tokens(chrome, 4000)
        ask(chrome, "1+1")
        wait_for(lambda: is_done(chrome))
        assert "failed: max_tokens: " in status(chrome)
        assert not status(chrome).endswith("..")


def test_a_long_chat_follows_the_newest_text_and_is_readable(chrome: Any, model: TextModel) -> None:
    with opened(chrome, model):
        set_max_tokens(chrome, 400)
        for _ in range(4):
            ask(chrome, "1+1")
            wait_for(lambda: is_done(chrome))
        assert browser.js(chrome, "document.documentElement.scrollHeight > innerHeight")
        wait_for(lambda: browser.js(chrome, f"{LAST} <= {FORM}"), 10)
        for scheme in SCHEMES:
            browser.resize(chrome, 1000, scheme)
            check_contrast(chrome)
        errors = [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
        # An earlier test asks for too many tokens.
        assert [entry for entry in errors if "status of 400" not in entry["message"]] == []


def test_escape_stops_as_the_button_does(chrome: Any, model: TextModel) -> None:
    with opened(chrome, model) as server:
        set_max_tokens(chrome, 400)
        ask(chrome, "1+1")
        wait_for(lambda: len(server.worker.active) == 1)
        browser.press(chrome, "\ue00c")  # Escape
        wait_for(lambda: not server.worker.active)
        wait_for(lambda: is_done(chrome))
        assert "stopped" in status(chrome)


def test_a_new_conversation_forgets_the_old_one(chrome: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    chatting = load(make_bytes_base(tmp_path, mask=True), device="cpu")
    chatting.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    with serving(chatting, Autoregressive(), prepare=lambda worker: slow(worker, 0.01)) as server:
        submit = mock.Mock(wraps=server.worker.submit)
        server.worker.submit = submit
        browser.resize(chrome, 360)
        chrome.get(address(server))
        wait_for(lambda: browser.js(chrome, "document.getElementById('model').textContent") == "additions")
        browser.js(chrome, "document.getElementById('max_tokens').value = 4")
        button = chrome.find_element(By.ID, "new")
        for num_turns in (1, 3, 1):  # the question, and earlier ones with their answers
            ask(chrome, "1+1")
            wait_for(lambda: is_done(chrome))
            [[job, *_]] = submit.call_args.args
            assert job.prompt.token_ids.count(chatting.tokenizer.eos_token_id) == num_turns
            if num_turns == 3:
                button.click()
                assert browser.js(chrome, "document.querySelectorAll('article').length") == 0
        browser.js(chrome, "document.getElementById('max_tokens').value = 400")
        ask(chrome, "1+1")
        wait_for(lambda: len(server.worker.active) == 1)
        button.click()  # in the middle of an answer, which ends with it
        wait_for(lambda: not server.worker.active)
        wait_for(lambda: is_done(chrome))
        assert browser.js(chrome, "document.querySelectorAll('article').length") == 0
        assert browser.js(chrome, "document.documentElement.scrollWidth") <= 360, "a phone's width"


def test_separated_thoughts_are_folded(chrome: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selenium.webdriver.common.by import By

    thinking = load(make_bytes_base(tmp_path, mask=True), device="cpu")
    thinking.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    monkeypatch.setattr(thinking, "detokenize", lambda tokens, **_: "<think>1 + 1</think>Two."[: 4 * len(tokens)])
    with serving(thinking, Autoregressive(), separate_reasoning=True) as server:
        chrome.get(address(server))
        wait_for(lambda: browser.js(chrome, "document.getElementById('model').textContent") == "additions")
        ask(chrome, "1+1?")
        wait_for(lambda: is_done(chrome))
        assert browser.js(chrome, "document.querySelector('article.assistant > div').textContent") == "Two."
        thoughts = chrome.find_element(By.CSS_SELECTOR, "article.assistant details p")
        assert not thoughts.is_displayed()
        chrome.find_element(By.CSS_SELECTOR, "article.assistant summary").click()
        assert thoughts.is_displayed()
        assert thoughts.text == "1 + 1"
        chrome.save_screenshot(str(tmp_path / "thoughts.png"))


def check_contrast(chrome: Any) -> None:
    [page] = browser.colours(chrome, "body", "backgroundColor")
    for selector in ("body", ".quiet", ".legend .draft", ".legend .verified"):
        for colour in browser.colours(chrome, selector, "color"):
            assert browser.contrast(page, colour) >= 4.5
    [button] = browser.colours(chrome, "button.main", "backgroundColor")
    assert browser.contrast(button, browser.colours(chrome, "button.main", "color")[0]) >= 4.5
