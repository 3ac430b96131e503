"""Reasoning effort and thoughts, as OpenAI's client sends and reads them.

"Thoughts" are the text between ``<think>`` and ``</think>``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

import openai

from refusion_lit import load
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.chat_template import effort_options
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from support.servers import NAME, address, serving
from support.tiny import make_bytes_base
from support.tools import TEMPLATES as TEMPLATES_OF_TOOLS
from support.tools import TOOLS, make_tool_model

QWEN = """\
{%- for m in messages %}<eos>{{ m.role }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content.split('</think>')[-1] }}
{%- endfor %}
{%- if add_generation_prompt %}<eos>assistant
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
"""A template like Qwen3's: it drops the thoughts of earlier turns, and ``enable_thinking`` turns thoughts off."""
EFFORT = (
    "{% if reasoning_effort == 'max' %}{{ raise_exception('no such effort') }}{% endif %}"
    "<eos>Reasoning: {{ reasoning_effort }}"
)
"""The head of a template like gpt-oss's, which reads ``reasoning_effort`` and refuses the effort "max"."""
TEMPLATES = {"qwen": QWEN, "gpt_oss": EFFORT + QWEN.replace("enable_thinking", "other"), "both": EFFORT + QWEN}
"""Templates by name: "qwen" reads ``enable_thinking``, "gpt_oss" reads ``reasoning_effort``, "both" reads both."""
TURNS: list[Any] = [{"role": "user", "content": "Rome?"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    path = make_bytes_base(tmp_path_factory.mktemp("base"), max_positions=2048, added=["<think>", "</think>"])
    models = {}
    for name, template in TEMPLATES.items():
        tokenizer_file = path / "tokenizer_config.json"
        tokenizer_file.write_text(json.dumps(json.loads(tokenizer_file.read_text()) | {"chat_template": template}))
        models[name] = load(path, device="cpu")
    return models


@pytest.fixture(params=TEMPLATES)
def served(request: pytest.FixtureRequest, models: dict[str, TextModel]) -> Iterator[tuple[str, TextModel, Any]]:
    """Serve a model with each template; yield the template's name, the model and a client."""
    model = models[request.param]
    with (
        serving(model, Autoregressive()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        yield request.param, model, client


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=TURNS, max_tokens=4, **options)


@pytest.mark.parametrize(("effort", "thinking"), [("none", False), ("low", True), ("xhigh", True)])
def test_an_effort_sets_what_the_template_reads(
    effort: Any, thinking: bool, served: tuple[str, TextModel, Any]
) -> None:
    """``reasoning_effort`` in chats and ``reasoning.effort`` in responses set the options that the template reads."""
    name, model, client = served
    options: dict[str, Any] = {}
    if name != "gpt_oss":
        options["enable_thinking"] = thinking
    if name != "qwen":
        options["reasoning_effort"] = effort
    expected = len(model.encode("Rome?", TURNS, chat_options=options))
    answer = chat(client, reasoning_effort=effort)
    assert answer.usage.prompt_tokens == expected
    response = client.responses.create(
        model=NAME, input="Rome?", max_output_tokens=4, reasoning={"effort": effort, "summary": "auto"}
    )
    assert response.usage.input_tokens == expected
    assert response.output_text == answer.choices[0].message.content
    assert response.reasoning.effort == effort


def test_options_of_the_template_in_a_request_win_over_its_effort(served: tuple[str, TextModel, Any]) -> None:
    name, model, client = served
    if name == "gpt_oss":
        pytest.skip("its template does not read enable_thinking")
    options: dict[str, Any] = {"enable_thinking": False}
    if name != "qwen":
        options["reasoning_effort"] = "low"
    expected = len(model.encode("Rome?", TURNS, chat_options=options))
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat(client, reasoning_effort="low", extra_body=given).usage.prompt_tokens == expected


def test_an_effort_that_the_template_or_the_server_does_not_know_is_refused(
    served: tuple[str, TextModel, Any],
) -> None:
    name, _, client = served
    if name != "qwen":  # the other templates read the effort, and do not know this one
        with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
            chat(client, reasoning_effort="max")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, reasoning_effort="huge")
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input="Rome?", reasoning={"effort": "huge"})
    assert caught.value.param == "reasoning.effort"


@pytest.mark.parametrize(
    ("template", "effort", "options"),
    [
        pytest.param(None, "high", {}, id="no template"),
        pytest.param("{{ messages }}", "high", {}, id="reads no option"),
        pytest.param("{% if thinking %}{{ messages }}{% endif %}", "none", {"thinking": False}, id="reads thinking"),
        pytest.param(
            "{% set thinking = 1 %}{{ messages[0].enable_thinking }}", "none", {}, id="sets a variable of that name"
        ),
        pytest.param(
            {"default": "{{ messages }}", "tool_use": "{{ reasoning_effort }}"},
            "low",
            {"reasoning_effort": "low"},
            id="one of two templates reads it",
        ),
        pytest.param("{{ reasoning_effort }}", None, {}, id="no effort is given"),
    ],
)
def test_options_that_a_template_does_not_read_are_left_out(template: Any, effort: Any, options: Any) -> None:
    assert effort_options(SimpleNamespace(chat_template=template), effort) == options


def find_thoughts(model: TextModel) -> tuple[dict[str, Any], str]:
    """Return sampling options with which the random model writes a text that has thoughts, and the text."""
    for seed in range(50):
        options = {"temperature": 1.0, "seed": seed}
        sampling = SamplingParams(max_new_tokens=150, **options)
        [row] = model.generate(["Rome?"], decoder=Autoregressive(), sampling=sampling)
        if "<think>" in row.text and "</think>" in row.text:
            return options, row.text
    raise AssertionError("no text has thoughts")


def test_without_separate_reasoning_thoughts_are_a_part_of_the_text(models: dict[str, TextModel]) -> None:
    """The served text equals the text of ``generate``."""
    model = models["qwen"]
    options, text = find_thoughts(model)
    with (
        serving(model, Autoregressive()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": NAME, "messages": TURNS, "max_tokens": 150, **options}
        assert client.chat.completions.create(**asked).choices[0].message.content == text
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        response = client.responses.create(
            model=NAME, input="Rome?", max_output_tokens=150, temperature=1.0, extra_body={"seed": options["seed"]}
        )
        assert response.output_text == text


def test_the_template_drops_thoughts_of_earlier_turns_but_reads_those_in_a_field(models: dict[str, TextModel]) -> None:
    model = models["qwen"]
    _, text = find_thoughts(model)
    question = {"role": "user", "content": "And?"}
    with_thoughts = {"role": "assistant", "content": text}
    without_thoughts = {"role": "assistant", "content": text.rpartition("</think>")[2]}
    with (
        serving(model, Autoregressive()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):

        def count_prompt_tokens(answer: dict[str, str]) -> int:
            turns: Any = [*TURNS, answer, question]
            completion: Any = client.chat.completions.create(model=NAME, messages=turns, max_tokens=1)
            return completion.usage.prompt_tokens

        assert count_prompt_tokens(with_thoughts) == count_prompt_tokens(without_thoughts)
        # A client may send thoughts back in a field; its name varies between clients.
        rendered = [*TURNS, without_thoughts | {"reasoning_content": "1+1"}, question]
        expected = len(model.encode("And?", rendered))
        for name in ("reasoning", "reasoning_content"):
            assert count_prompt_tokens(without_thoughts | {name: "1+1"}) == expected


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CHARACTERS_PER_TOKEN = 30


@dataclass(frozen=True)
class Written:
    """A text that the model writes, and its parts.

    Attributes:
        whole: The text.
        is_open: Whether the template ends with ``<think>``, so that the text begins with thoughts.
        thoughts: The thoughts.
        text: The text after the thoughts, without calls.
        num_calls: Number of calls after the thoughts.
    """

    whole: str
    is_open: bool
    thoughts: str
    text: str
    num_calls: int

    @property
    def num_thought_tokens(self) -> int | None:
        """Number of tokens up to the end of the thoughts; ``None`` if the thoughts do not end."""
        if "</think>" not in self.whole:
            return None
        return ceil((self.whole.find("</think>") + len("</think>")) / CHARACTERS_PER_TOKEN)


WRITTEN = [
    pytest.param(
        Written(f"<think>\nIs it {CALL}?\n</think>\n\n{CALL}", False, f"Is it {CALL}?", "", 1),
        id="a call in the thoughts and a call after them",
    ),
    pytest.param(
        Written(f"Hm: {CALL}\n</think>\n\nNo.", True, f"Hm: {CALL}", "No.", 0),
        id="a call in thoughts that the template opened",
    ),
    pytest.param(Written(f"{CALL} and", True, f"{CALL} and", "", 0), id="thoughts that do not end"),
]


Parts = tuple[str, str, int]
"""Thoughts, text and number of calls of an answer."""


def expected_parts(written: Written, *, separate: bool) -> Parts:
    if separate:
        return written.thoughts, written.text, written.num_calls
    if written.num_calls:
        return "", written.whole.removesuffix(CALL).rstrip(), written.num_calls
    return "", written.whole, 0


def parts_of_stream(chunks: Any) -> Parts:
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas)
    text = "".join(delta.content or "" for delta in deltas)
    return thoughts, text, sum(len(delta.tool_calls or []) for delta in deltas)


def parts_of_response(response: Any) -> Parts:
    reasoning = [item for item in response.output if item.type == "reasoning"]
    thoughts = "".join(part.text for item in reasoning for part in item.content)
    return thoughts, response.output_text, sum(item.type == "function_call" for item in response.output)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("written", WRITTEN)
def test_calls_within_thoughts_are_no_calls(
    tmp_path: Path, written: Written, separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client must not run a tool that the model only thought about: in chats, responses and streams.

    With ``separate_reasoning`` the thoughts have a field of their own; without, they are part of the text.
    """
    model = make_tool_model(tmp_path)
    model.tokenizer.chat_template += f"{'<think>' if written.is_open else ''}\n"

    def write(tokens: list[int], **_: Any) -> str:
        """Write the text whatever tokens are drawn, ``CHARACTERS_PER_TOKEN`` for every token."""
        return written.whole[: CHARACTERS_PER_TOKEN * len(tokens)]

    monkeypatch.setattr(model, "detokenize", write)
    expected = expected_parts(written, separate=separate)
    # Log-probabilities are asked for, too: they must not change what is a thought, a call or the answer.
    asked: dict[str, Any] = {"model": NAME, "messages": TURNS, "tools": TOOLS, "max_tokens": 20, "logprobs": True}
    functions: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    include: list[Any] = ["message.output_text.logprobs"]

    def respond(items: Any, **options: Any) -> Any:
        return client.responses.create(
            model=NAME, input=items, tools=functions, max_output_tokens=20, include=include, **options
        )

    with (
        serving(model, Autoregressive(), separate_reasoning=separate) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        parts = getattr(message, "reasoning_content", ""), message.content or "", len(message.tool_calls or [])
        assert parts == expected
        details = answer.usage and answer.usage.completion_tokens_details
        assert (details is not None) == separate
        if details is not None and written.num_thought_tokens is not None:
            assert details.reasoning_tokens == written.num_thought_tokens

        assert parts_of_stream(client.chat.completions.create(**asked, stream=True)) == expected

        events = [*respond("Rome?", stream=True)]
        thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert (thoughts, text) == expected[:2]
        for response in (respond("Rome?"), events[-1].response):
            assert parts_of_response(response) == expected
            num_thought_tokens = response.usage.output_tokens_details.reasoning_tokens
            assert num_thought_tokens == (details.reasoning_tokens if details else 0)
            assert respond([{"role": "user", "content": "Rome?"}, *response.output]).output, "the conversation goes on"


def test_tags_that_are_special_tokens_are_not_in_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's tags are special tokens: they mark thoughts and calls, but clients never see them."""
    path = make_bytes_base(tmp_path, max_positions=2048, special=["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    tokenizer_file = path / "tokenizer_config.json"
    template = "{# [THINK] #}" + TEMPLATES_OF_TOOLS["mistral_args"]
    tokenizer_file.write_text(json.dumps(json.loads(tokenizer_file.read_text()) | {"chat_template": template}))
    model = load(path, device="cpu")
    call = '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'
    ids = model.tokenizer(f"[THINK]{call}?[/THINK]So: {call}", add_special_tokens=False)["input_ids"]
    detokenize = model.detokenize
    monkeypatch.setattr(model, "detokenize", lambda tokens, **options: detokenize(ids[: len(tokens)], **options))
    asked: dict[str, Any] = {"model": NAME, "messages": TURNS, "tools": TOOLS, "max_tokens": len(ids)}
    for separate, expected in ((False, (None, f"{call}?So:")), (True, (f"{call}?", "So:"))):
        with (
            serving(model, Autoregressive(), separate_reasoning=separate) as server,
            openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
        ):
            message = client.chat.completions.create(**asked).choices[0].message
            assert (getattr(message, "reasoning_content", None), message.content) == expected
            assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [{"a": 1, "b": 2}]


ACCEPTED_IN_CHATS: list[dict[str, Any]] = [  # fields that clients of 2026 send, often by default
    {"store": False, "metadata": {"run": "1"}, "parallel_tool_calls": True, "service_tier": "auto", "user": "me",
     "prompt_cache_key": "a", "safety_identifier": "b", "verbosity": "medium", "n": 1, "seed": 3, "logit_bias": {},
     "stream_options": {"include_usage": True, "include_obfuscation": False}, "max_completion_tokens": 2,
     "modalities": ["text"], "prompt_cache_retention": "24h", "reasoning_effort": "medium"},
    {"store": True, "service_tier": "fast", "function_call": "none", "functions": [], "max_tokens": 2,
     "max_completion_tokens": 2, "extra_body": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0,
     "length_penalty": 1.0, "use_beam_search": False, "ignore_eos": False, "continue_final_message": False},
     "messages": [{"role": "user", "content": [{"type": "text", "text": "Rome?", "cache_control": {"type": "a"}}]}]},
]  # fmt: skip
ACCEPTED_IN_RESPONSES: list[dict[str, Any]] = [
    {"store": False, "metadata": {"run": "1"}, "parallel_tool_calls": True, "service_tier": "auto", "user": "me",
     "prompt_cache_key": "a", "safety_identifier": "b", "text": {"verbosity": "medium"}, "truncation": "disabled",
     "include": ["reasoning.encrypted_content"], "background": False, "max_output_tokens": 2,
     "stream_options": {"include_obfuscation": False}, "reasoning": {"effort": "medium", "summary": "auto"}},
    {"store": True, "service_tier": "ultrafast", "truncation": "auto", "max_tool_calls": 2, "max_output_tokens": 2,
     "reasoning": {"mode": "standard", "context": "auto"}, "extra_body": {"top_k": 0}, "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?", "prompt_cache_breakpoint": {"a": "b"}}]},
        {"role": "assistant", "phase": "final_answer", "content": "Paris."}, {"role": "user", "content": "Rome?"}]},
]  # fmt: skip
REFUSED_IN_CHATS: list[dict[str, Any]] = [
    {"max_tokens": 2, "max_completion_tokens": 3},
    {"verbosity": "low"},
    {"logit_bias": {"5": 1}},
    {"modalities": ["text", "audio"]},
    {"prediction": {"type": "content", "content": "a"}},
    {"web_search_options": {}},
    {"functions": [{"name": "f"}]},
    {"audio": {"voice": "a", "format": "wav"}},
    {"stream_options": {"include_prompt": True}},
]
REFUSED_IN_RESPONSES: list[dict[str, Any]] = [
    {"truncation": "last"},
    {"text": {"verbosity": "low"}},
    {"reasoning": {"context": "all_turns"}},
    {"image": {}},
    {"previous_response_id": "resp_1"},
    {"conversation": "conv_1"},
    {"prompt": {"id": "p"}},
    {"background": True},
    {"reasoning": {"mode": "pro"}},
]


def test_fields_of_todays_clients_are_accepted_or_refused_by_name(models: dict[str, TextModel]) -> None:
    with (
        serving(models["qwen"], Autoregressive()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        chats: Any = client.chat.completions
        responses: Any = client.responses
        for api, prompt, accepted, refused in (
            (chats, {"messages": TURNS}, ACCEPTED_IN_CHATS, REFUSED_IN_CHATS),
            (responses, {"input": "Rome?"}, ACCEPTED_IN_RESPONSES, REFUSED_IN_RESPONSES),
        ):
            for fields in accepted:
                assert [*api.create(model=NAME, **(prompt | fields), stream=True)]
            for fields in refused:
                with pytest.raises(openai.BadRequestError) as caught:
                    api.create(model=NAME, **prompt, **fields)
                last = [*fields][-1]
                assert str(caught.value.param).startswith(last), fields
