"""``/v1/responses`` as OpenAI's client sees it: the texts and calls of chats, and streams that add up to responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

from refusion_lit.decoding import Autoregressive
from support.servers import NAME, address, serving, slow, wait_for
from support.tools import SCHEMAS, TOOLS, make_tool_model

FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """OpenAI's client of a server whose random model writes calls of ``TOOLS`` under a grammar."""
    model = make_tool_model(tmp_path_factory.mktemp("base"))
    with (
        serving(model, Autoregressive()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def respond(client: Any, items: Any = "Rome?", **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": NAME, "input": items, "max_output_tokens": 200}
    return client.responses.create(**defaults | options)


def check_events(events: list[Any]) -> Any:
    """Check that the deltas of a stream add up to the texts and arguments of its last response; return the response."""
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1].response
    assert events[-1].type == f"response.{response.status}"
    kinds = ("response.output_text.delta", "response.function_call_arguments.delta")
    for index, item in enumerate(response.output):
        deltas = "".join(event.delta for event in events if event.type in kinds and event.output_index == index)
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in response.output]
    return response


def test_responses_have_the_texts_of_chats(client: Any) -> None:
    turns: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}]
    chat = client.chat.completions.create(model=NAME, messages=turns, max_tokens=9)
    for items in ("Rome?", turns[1:], [{"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}]):
        response = respond(client, items, instructions="Be brief.", max_output_tokens=9)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    streamed = check_events([*respond(client, turns, max_output_tokens=9, stream=True)])
    assert streamed.output_text == response.output_text


def test_an_agent_sends_back_calls_and_results(client: Any) -> None:
    """Four turns, in which the model must call a function, and a fifth in which it must not."""
    items: list[Any] = [{"role": "user", "content": "Rome?"}]
    for turn in range(4):
        choice: Any = "required" if turn % 2 else {"type": "function", "name": [*SCHEMAS][turn // 2]}
        answer = respond(client, items, tools=FUNCTIONS, tool_choice=choice)
        assert answer.status == "completed"
        streamed = check_events([*respond(client, items, tools=FUNCTIONS, tool_choice=choice, stream=True)])
        for response in (answer, streamed):
            calls = response.output
            assert {call.type for call in calls} == {"function_call"}
            for call in calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert [call.arguments for call in streamed.output] == [call.arguments for call in answer.output]
        items += answer.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in answer.output]
    ended = respond(client, items, tools=FUNCTIONS, tool_choice="none", max_output_tokens=5)
    assert [item.type for item in ended.output] == ["message"]


def test_responses_have_the_log_probabilities_of_chats(client: Any) -> None:
    """This holds with and without tools, and every delta of a stream has the log-probabilities of its tokens."""
    turns: Any = [{"role": "user", "content": "Rome?"}]
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 30}
    for tools, functions in (([], []), (TOOLS, FUNCTIONS)):
        options: dict[str, Any] = {"max_tokens": 30, "logprobs": True, "top_logprobs": 2}
        [choice] = client.chat.completions.create(
            model=NAME, messages=turns, tools=tools or openai.omit, **options
        ).choices
        expected = choice.logprobs.content
        tokens = [entry.token for entry in expected]
        events = [*respond(client, tools=functions, stream=True, **asked)]
        for response in (respond(client, tools=functions, **asked), check_events(events)):
            [part] = response.output[0].content
            assert part.text == choice.message.content
            for actual, entry in zip(part.logprobs, expected, strict=True):
                assert (actual.token, actual.forward) == (entry.token, entry.forward)
                assert actual.logprob == pytest.approx(entry.logprob, abs=1e-5)
            assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * len(expected)
            assert response.top_logprobs == 2
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [entry.token for event in deltas for entry in event.logprobs] == tokens
        for event in deltas:
            assert b"".join(bytes(entry.bytes) for entry in event.logprobs).decode(errors="replace") == event.delta
        [done] = [event for event in events if event.type == "response.output_text.done"]
        assert [entry.token for entry in done.logprobs] == tokens
    plain = respond(client, max_output_tokens=5, include=["reasoning.encrypted_content"])
    assert plain.output[0].content[0].logprobs == []


def test_log_probabilities_of_calls_are_left_out(client: Any) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": FUNCTIONS}
    events = [*respond(client, stream=True, tool_choice="required", **asked)]
    assert {item.type for item in check_events(events).output} == {"function_call"}


def test_tools_are_rendered_as_in_chats(client: Any) -> None:
    """The order of a tool's fields is the client's, and its schema is whole."""
    schema = SCHEMAS["add"] | {"default": None}
    function = {"parameters": schema, "description": "adds", "name": "add"}
    tools: list[Any] = [{"type": "function", "function": function}]
    turns: Any = [{"role": "user", "content": "Rome?"}]
    options: dict[str, Any] = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    chat = client.chat.completions.create(model=NAME, messages=turns, tools=tools, max_tokens=60, **options)
    response = respond(client, tools=[{"type": "function", **function}], max_output_tokens=60, **options)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.output[0].arguments == chat.choices[0].message.tool_calls[0].function.arguments


def test_a_schema_is_kept(client: Any) -> None:
    schema = SCHEMAS["add"] | {"additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "sum", "schema": schema}}
    jsonschema.validate(json.loads(respond(client, text=form).output_text), schema)


REFUSED: list[tuple[dict[str, Any], str]] = [  # options, the field that is wrong
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call"}]}, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice.name"),
    ({"tools": FUNCTIONS, "tool_choice": "required", "max_output_tokens": 5}, "max_output_tokens"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
    ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["x"]}, "include.0"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
]


def test_requests_that_cannot_be_served_are_refused_by_the_name_of_the_field(client: Any) -> None:
    for options, field in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            respond(client, **options)
        assert str(caught.value.param).startswith(field), (options, caught.value)
    assert respond(client, store=True, max_output_tokens=2).store is False, "nothing is stored"


def test_a_stream_that_fails_or_is_closed_leaves_no_request_in_flight(tmp_path: Path) -> None:
    """The first stream exceeds ``max_seconds``; the client closes the second."""
    model = make_tool_model(tmp_path)
    with (
        serving(model, Autoregressive(), max_seconds=1.5, prepare=lambda worker: slow(worker, 0.1)) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        events = [*respond(client, stream=True)]
        assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        wait_for(lambda: not server.worker.active)
        stream = respond(client, stream=True)
        next(stream)
        stream.close()
        wait_for(lambda: not server.worker.active)
