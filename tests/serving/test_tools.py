"""Tools as OpenAI's client sees them: calls that parse, streams that assemble, turns that go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install --group test")
pytest.importorskip("jsonschema", reason="needs jsonschema: pip install --group test")
pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

import jsonschema
import openai

from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.serving.app import Server
from refusion_lit.serving.service import Service
from refusion_lit.text_model import TextModel
from refusion_lit.types import Prompt, SamplingParams
from support.servers import NAME, address, serving, slow, wait_for
from support.tools import SCHEMAS, TEMPLATES, TOOLS, make_tool_model, tool

ASKED: list[Any] = [{"role": "user", "content": "Rome?"}]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@contextmanager
def connect(model: TextModel, decoder: Any, **options: Any) -> Iterator[tuple[Server, Any]]:
    with (
        serving(model, decoder, **options) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def ask(client: Any, messages: Any = ASKED, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": NAME, "messages": messages, "tools": TOOLS, "max_tokens": 200}
    return client.chat.completions.create(**defaults | options)


def check_calls(choice: Any) -> list[tuple[str, str]]:
    """Return an answer's calls, which keep the schemas."""
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [(call.function.name, call.function.arguments) for call in calls]


def assemble(chunks: Any) -> tuple[list[tuple[str, str]], str, str]:
    """Return the calls of a stream, its text, and why it ended; every call begins with its id and name."""
    calls: dict[int, list[str]] = {}
    text, reason = "", ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or []:
                has_begun = delta.index in calls
                assert (delta.id is None, delta.function.name is None) == (has_begun, has_begun)
                call = calls.setdefault(delta.index, [delta.function.name, ""])
                call[1] += delta.function.arguments
    return [(name, arguments) for name, arguments in calls.values()], text, reason


def describe(answer: Any) -> tuple[Any, ...]:
    """Return what an answer has but for random ids; log-probabilities, rounded."""
    [choice] = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    tokens = [
        (entry.token, entry.forward, entry.logprob and round(entry.logprob, 3), len(entry.top_logprobs))
        for entry in choice.logprobs.content
    ]
    return calls, choice.message.content, choice.message.role, choice.finish_reason, tokens, answer.usage


def assemble_by_client(client: Any, **options: Any) -> tuple[Any, ...]:
    """Return what OpenAI's client assembles from a stream."""
    defaults: dict[str, Any] = {"model": NAME, "messages": ASKED, "tools": TOOLS, "max_tokens": 200}
    with client.chat.completions.stream(**defaults, stream_options={"include_usage": True}, **options) as stream:
        return describe(stream.get_final_completion())


@pytest.mark.parametrize(
    ("decoder", "template"),
    [*((Autoregressive(), template) for template in TEMPLATES), (ReFusion(slot_size=4), next(iter(TEMPLATES)))],
)
def test_forced_calls_parse_and_stream(tmp_path: Path, template: str, decoder: Any) -> None:
    model = make_tool_model(tmp_path, template, mask=isinstance(decoder, ReFusion))
    with connect(model, decoder) as (_, client):
        for choice in ("required", NAMED):
            calls = check_calls(ask(client, tool_choice=choice).choices[0])
            if choice is NAMED:
                assert [name for name, _ in calls] == ["add"]
            assert assemble(ask(client, tool_choice=choice, stream=True)) == (calls, "", "tool_calls")
            options: dict[str, Any] = {"tool_choice": choice, "logprobs": True, "top_logprobs": 2}
            assert assemble_by_client(client, **options) == describe(ask(client, **options))
        options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 1, "n": 3}
        answer = ask(client, **options)
        assert [len(check_calls(choice)) for choice in answer.choices] == [1, 1, 1]


@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion()], ids=lambda value: type(value).__name__)
def test_an_agent_of_ten_turns(tmp_path: Path, decoder: Any) -> None:
    """The client sends back every call with its result, and the template renders both."""
    model = make_tool_model(tmp_path, mask=True)
    turns: list[Any] = [{"role": "developer", "content": "Use tools."}, *ASKED]
    called = set()
    with connect(model, decoder) as (server, client):
        for turn in range(10):
            choice: Any = "required"
            if turn % 3 == 0:  # a function is named, one and the other in turn
                choice = {"type": "function", "function": {"name": [*SCHEMAS][turn % 2]}}
            options: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": turn}
            chosen = ask(client, turns, tool_choice=choice, **options).choices[0]
            called |= {name for name, _ in check_calls(chosen)}
            turns.append(chosen.message.model_dump(exclude_none=True))
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in chosen.message.tool_calls]
            turns += results
        assert called == {*SCHEMAS}
        answer = ask(client, turns, max_tokens=8, tool_choice="none")
        assert answer.choices[0].message.tool_calls is None
        assert answer.usage.prompt_tokens > 500
        wait_for(lambda: not server.worker.active)


def test_texts_are_those_without_a_server(tmp_path: Path) -> None:
    model = make_tool_model(tmp_path)
    sampling = SamplingParams(max_new_tokens=12)

    def alone(tools: Any) -> str:
        prompt = Prompt(token_ids=tuple(model.encode("Rome?", ASKED, tools)), id="0")
        return model.decode([prompt], Autoregressive(), sampling).rows[0].text

    with connect(model, Autoregressive()) as (_, client):
        for choice, tools in (("auto", TOOLS), ("none", [])):
            answer = ask(client, tool_choice=choice, max_tokens=12)
            assert answer.choices[0].message.content == alone(tools)
            assert answer.usage.prompt_tokens == len(model.encode("Rome?", ASKED, tools))
            stream = ask(client, tool_choice=choice, max_tokens=12, stream=True)
            assert assemble(stream) == ([], alone(tools), answer.choices[0].finish_reason)


@pytest.mark.parametrize("template", ["hermes", "mistral", "mistral_args"])
def test_a_model_may_call_or_not(tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made to write calls, of which the reader does not know."""
    constrain = Service._constrain

    def force(service: Any, prompts: Any, body: Any, calls: Any, sampling: Any) -> Any:
        return constrain(service, prompts, body, replace(calls, are_forced=True), sampling)

    with connect(make_tool_model(tmp_path, template), Autoregressive()) as (_, client):
        monkeypatch.setattr(Service, "_constrain", force)
        [choice] = ask(client, logprobs=True).choices
        calls = check_calls(choice)
        assert assemble(ask(client, stream=True)) == (calls, "", "tool_calls")
        assert calls[0][0] in "".join(entry.token for entry in choice.logprobs.content)


def test_what_looks_like_a_call_remains_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = '<tool_call>{"name": "add", bad} </tool_call> '

    def write(service: Any, prompts: Any, body: Any, calls: Any, sampling: Any) -> Any:
        return service.schemas.constrain(prompts, {"const": broken}, service.worker.decoder, sampling)

    monkeypatch.setattr(Service, "_constrain", write)
    with connect(make_tool_model(tmp_path, has_markers=False), Autoregressive()) as (_, client):
        [choice] = ask(client).choices
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert json.loads(choice.message.content) == broken
        assert assemble(ask(client, stream=True)) == ([], choice.message.content, "stop")


REFUSED: list[tuple[dict[str, Any], str]] = [  # options, the field that is wrong
    ({"tool_choice": "maybe"}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice.function.name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [tool("a b", {})]}, "tools.0.function.name"),
    ({"tools": [tool("f", {"type": "array"})]}, "tools.0.function"),
    (
        {"tools": [tool("f", {"properties": {"a": {"type": "x"}}, "required": ["a"]})], "tool_choice": "required"},
        "tools",
    ),
    ({"tool_choice": "required", "stop": ["}"]}, "tools"),
    ({"tool_choice": "required", "max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]


def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path) -> None:
    with connect(make_tool_model(tmp_path), Autoregressive()) as (_, client):
        for options, field in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, **options)
            assert caught.value.param == field, (options, caught.value)
        for options in ({"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "none"}):
            assert ask(client, max_tokens=2, **options).choices[0].message.tool_calls is None


def test_a_template_without_tools_is_refused(server: Server) -> None:
    with openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, max_tokens=4)
        assert caught.value.param == "tools"


def test_a_client_that_leaves_a_call_frees_its_row(tmp_path: Path) -> None:
    model = make_tool_model(tmp_path)
    with connect(model, Autoregressive(), rows=1, prepare=lambda worker: slow(worker, 0.05)) as (server, client):
        stream = ask(client, tool_choice="required", stream=True, logprobs=True, top_logprobs=2)
        next(stream)
        stream.close()
        wait_for(lambda: not server.worker.active)
    limited = connect(model, Autoregressive(), max_seconds=0.5, prepare=lambda worker: slow(worker, 0.1))
    with limited as (server, client):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, tool_choice="required")
        assert caught.value.status_code == 504
        wait_for(lambda: not server.worker.active)
