"""The API as OpenAI's client sees it: answers, streams, counts, refusals."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
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

from refusion_lit import load
from refusion_lit.decoding import Autoregressive, Generation, ReFusion, SelfSpeculative
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.serving import Limits
from refusion_lit.serving.app import Server, build_app
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import Worker
from refusion_lit.text_model import TextModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from support.servers import MODEL, NAME, address, raw, serving, slow, wait_for
from support.tiny import make_bytes_base

TEXTS = ["1+1", "12+30=", "7+8=15;", "99+1", "3,4"]


@pytest.fixture
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client:
        yield client


def decode_alone(model: TextModel, text: str, prompt_id: str = "0", **options: Any) -> Generation:
    """Return the answer of the model without a server, to compare with."""
    sampling = SamplingParams(**{"max_new_tokens": 16} | options)
    prompt = Prompt(token_ids=tuple(model.encode(text)), id=prompt_id)
    return model.decode([prompt], model.default_decoder, sampling).rows[0]


def chat(client: Any, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=NAME, messages=messages, **options)


@pytest.mark.parametrize("text", TEXTS[:3])
def test_answers_equal_decoding_without_a_server(client: Any, model: TextModel, text: str) -> None:
    row = decode_alone(model, text)
    response = chat(client, text)
    assert response.choices[0].message.content == row.text
    assert response.choices[0].finish_reason == {"eos": "stop"}.get(row.finish_reason, row.finish_reason)
    assert response.usage.completion_tokens == row.num_tokens
    assert response.usage.prompt_tokens == len(model.encode(text))
    assert response.usage.forwards == row.num_forwards
    assert response.usage.tokens_per_forward == pytest.approx(row.num_tokens / row.num_forwards, abs=1e-3)
    completion = client.completions.create(model=NAME, prompt=text, max_tokens=7)
    assert completion.choices[0].text == decode_alone(model, text, max_new_tokens=7).text


def test_a_stream_grows_to_the_answer(client: Any, model: TextModel) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chat(client, "1+1", max_tokens=40, **options))
    row = decode_alone(model, "1+1", max_new_tokens=40)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == row.text
    assert sum(map(bool, texts)) > 1, "piece by piece"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert chunks[-1].usage.completion_tokens == row.num_tokens
    pieces = client.completions.create(model=NAME, prompt=TEXTS[2], stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == decode_alone(model, TEXTS[2]).text


def test_a_stream_has_the_role_once(client: Any, model: TextModel) -> None:
    """OpenAI's client joins the texts of a field, so that a role sent twice would become ``assistantassistant``."""
    messages: Any = [{"role": "user", "content": "12+30="}]
    with client.chat.completions.stream(model=NAME, messages=messages, n=2, max_tokens=40) as stream:
        answers = [choice.message for choice in stream.get_final_completion().choices]
    assert [(message.role, message.content) for message in answers] == [
        ("assistant", decode_alone(model, "12+30=").text)
    ] * 2


def test_choices_are_drawn_with_one_seed_and_different_ids(client: Any, model: TextModel) -> None:
    response = chat(client, "1+1", n=3, temperature=0.9, seed=7, stop=["2"], top_p=0.9)
    rows = [decode_alone(model, "1+1", str(i), temperature=0.9, seed=7, stop=("2",), top_p=0.9) for i in range(3)]
    assert [choice.message.content for choice in response.choices] == [row.text for row in rows]


def test_the_seed_of_a_request_without_one_is_returned(client: Any, model: TextModel) -> None:
    answer = chat(client, "1+1", temperature=1.0)
    assert decode_alone(model, "1+1", temperature=1.0, seed=answer.seed).text == answer.choices[0].message.content


def test_a_stop_string_may_be_longer_than_the_answer(client: Any, model: TextModel) -> None:
    stopped = chat(client, "1+1", stop="one text of more than 16 characters")
    assert stopped.choices[0].message.content == decode_alone(model, "1+1").text


@pytest.mark.parametrize(("top_k", "expected"), [(1, 1), (-1, None), (0, None)])
def test_top_k_limits_the_choice_unless_it_is_0_or_minus_1(
    client: Any, model: TextModel, top_k: int, expected: int | None
) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    answer = chat(client, "1+1", extra_body={**sampling, "top_k": top_k}).choices[0].message.content
    assert answer == decode_alone(model, "1+1", **sampling, top_k=expected).text


def test_best_of_is_refused_unless_it_is_1(client: Any, model: TextModel) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="1+1", best_of=2)
    assert caught.value.param == "best_of"
    several = client.completions.create(model=NAME, prompt=TEXTS[:3], best_of=1)
    assert [choice.text for choice in several.choices] == [decode_alone(model, text).text for text in TEXTS[:3]]


def test_a_stream_with_include_decode_has_an_event_for_every_forward_pass(model: TextModel) -> None:
    """An event has what a forward pass drafted, verified and committed, even if it committed nothing."""
    decoder = ReFusion(slot_size=4, num_serial_blocks=2)
    prompt = Prompt(token_ids=tuple(model.encode("1+1")), id="0")
    sampling = SamplingParams(max_new_tokens=24)
    [row] = model.decode([prompt], decoder, sampling, trace=True).rows
    with serving(model, decoder) as server, openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none") as client:
        options = {"stream": True, "stream_options": {"include_decode": True}}
        chunks = list(chat(client, "1+1", max_tokens=24, **options))
    steps = [chunk.decode["rounds"] for chunk in chunks]
    assert [len(rounds) for rounds in steps] == [1] * row.num_forwards
    rounds = [entry for [entry] in steps]
    start = len(prompt.token_ids)
    for message, entry in zip(rounds, row.trace, strict=True):
        assert message["phase"] == entry.phase
        assert message["drafted"] == [position - start for position in entry.positions]
        assert message["texts"] == [model.token_text(token) for token in entry.tokens]
        assert message["committed"] == [position - start for position in entry.accepted]
    drafted: set[int] = set()
    for message, entry in zip(rounds, row.trace, strict=True):
        assert len(message["verified"]) == len(entry.scores)
        assert drafted >= {*message["verified"]}
        drafted = drafted.union(message["drafted"]).difference(message["committed"])
    assert any(message["verified"] and not message["committed"] for message in rounds), "all drafts of a round fail"


def test_the_asynchronous_client_and_200_connections(model: TextModel) -> None:
    async def ask(url: str) -> list[Any]:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}  # to connect, too
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
            return await asyncio.gather(*(chat(client, TEXTS[i % 5], max_tokens=4 + i % 3) for i in range(200)))

    with serving(model, rows=16, max_waiting=200) as server:
        responses = asyncio.run(ask(address(server)))
    expected = {
        (text, length): decode_alone(model, text, max_new_tokens=length).text for text in TEXTS for length in (4, 5, 6)
    }
    for i, response in enumerate(responses):
        assert response.choices[0].message.content == expected[TEXTS[i % 5], 4 + i % 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_are_made_while_few_requests_share_a_forward_pass(dtype: Any) -> None:
    """A single request takes as many forward passes as without a server, and more among many requests.

    The text is the same in both cases.
    """
    overrides = BackboneConfig(source=str(MODEL), batch_invariant=dtype == "bfloat16")
    model = load(MODEL, device="cpu", dtype=dtype, overrides=overrides)
    decoder = SelfSpeculative(slot_size=4)
    prompt = Prompt(token_ids=tuple(model.encode("12+34,56+78>")), id="0")
    row = model.decode([prompt], decoder, SamplingParams(max_new_tokens=40)).rows[0]

    async def ask(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            first = await chat(client, "12+34,56+78>", max_tokens=40)
            return [first, *await asyncio.gather(*(chat(client, "12+34,56+78>", max_tokens=40) for _ in range(16)))]

    with serving(model, decoder, rows=16, prepare=slow) as server:
        responses = asyncio.run(ask(address(server)))
    assert [response.choices[0].message.content for response in responses] == [row.text] * 17
    first, *others = (response.usage.forwards for response in responses)
    assert first == row.num_forwards < row.num_tokens
    assert max(others) > first


@pytest.mark.parametrize("decoder", [None, Autoregressive()], ids=["ReFusion", "Autoregressive"])
def test_in_bfloat16_an_answer_does_not_depend_on_other_requests(decoder: Any) -> None:
    """Greedy and seeded requests are sent alone, then all at once, while other clients close their streams."""
    overrides = BackboneConfig(source=str(MODEL), batch_invariant=True)
    exact = load(MODEL, device="cpu", dtype="bfloat16", overrides=overrides)
    asked = [
        {"text": text, "max_tokens": 6 + 7 * i, "temperature": temperature, "seed": i, "top_p": top_p}
        for i, text in enumerate(TEXTS)
        for temperature, top_p in ((0.0, 1.0), (1.0, (1.0, 0.8)[i % 2]))
    ]

    async def leave(client: Any, i: int) -> None:
        stream = await chat(client, TEXTS[i % 5], max_tokens=60, temperature=1.0, seed=100 + i, stream=True)
        async for _ in stream:
            break
        await stream.close()

    async def list_rounds(client: Any, text: str, **options: Any) -> list[Any]:
        """Return what every forward pass drafted and committed."""
        more = {"stream": True, "stream_options": {"include_decode": True}}
        chunks = [chunk async for chunk in await chat(client, text, **options, **more)]
        return [entry for chunk in chunks if hasattr(chunk, "decode") for entry in chunk.decode["rounds"]]

    async def ask(url: str) -> tuple[list[Any], list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            one_by_one = [await list_rounds(client, **options) for options in asked]
            all_at_once = (list_rounds(client, **options) for options in asked)
            outcomes = await asyncio.gather(*all_at_once, *(leave(client, i) for i in range(10)))
            return one_by_one, outcomes[: len(asked)]

    with serving(exact, decoder, rows=4) as server:
        one_by_one, all_at_once = asyncio.run(ask(address(server)))
    assert all_at_once == one_by_one
    assert all(one_by_one)


REFUSED: list[tuple[dict[str, Any], str, str]] = [  # options, the field that is wrong, words of the message
    ({"extra_body": {"guided_json": {}}}, "guided_json", "refused"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "chat template"),
    ({"extra_body": {"max_new_tokens": 4}}, "max_new_tokens", "refused"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "refused"),
    ({"extra_body": {"frequency_penalty": False}}, "frequency_penalty", "refused"),
    ({"extra_body": {"tools": ""}}, "tools", "list"),
    ({"extra_body": {"tools": {}}}, "tools", "list"),
    ({"max_tokens": 4000}, "max_tokens", "at most 1024, got 4000"),
    ({"max_tokens": 0}, "max_tokens", "got 0"),
    ({"temperature": -1}, "temperature", "got -1"),
    ({"extra_body": {"max_tokens": "5"}}, "max_tokens", 'integer, got "5"'),
    ({"extra_body": {"seed": True}}, "seed", "integer, got true"),
    ({"extra_body": {"n": "1"}}, "n", 'integer, got "1"'),
    ({"n": 17}, "n", "16, got 17"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [3]}, "stop.0", "string, got 3"),
    ({"max_tokens": 600}, "max_tokens", "512 tokens, got 600"),
    ({"extra_body": {"str": 1}}, "str", "refused"),
    ({"stop": 3}, "stop", "list, got 3"),
    ({"stop": [""]}, "stop", "empty"),
    ({"response_format": {"type": "json_object"}}, "response_format", "optional or unnamed properties"),
    ({"extra_body": {"max_completion_tokens": 5}, "max_tokens": 4}, "max_completion_tokens", "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {"enum": [1]}}}},
     "response_format.json_schema", "schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": False}}}, "response_format.json_schema", "schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "field", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_requests_that_cannot_be_served_are_refused_by_the_name_of_the_field(
    client: Any, options: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "1+1", **options)
    assert caught.value.param == field
    assert caught.value.body["message"].startswith(f"{field}: ")
    assert words in caught.value.body["message"]


def test_json_of_too_many_levels_is_refused(client: Any) -> None:
    for levels in (400, 900, 5000):
        arguments = '{"a": ' * levels + "1" + "}" * levels
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: list[Any] = [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
        ]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=NAME, messages=turns)


def test_texts_and_histories_beyond_any_prompt_are_refused_before_they_are_encoded(
    client: Any, server: Server, model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding a huge text would keep the server busy. Here encoding would raise an error."""
    max_tokens = server.worker.limits.max_prompt_tokens
    longest_token = max(map(len, model.tokenizer.get_vocab()))
    too_long = "1" * (max_tokens * longest_token + 1)
    monkeypatch.setattr("refusion_lit.serving.service.encode_plain_prompt", None)
    monkeypatch.setattr(TextModel, "encode", None)
    for prompt in (too_long, ["1", too_long]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt=prompt)
        assert caught.value.param == "prompt"
    too_many_turns: Any = [{"role": "user", "content": "1"}] * (max_tokens + 1)
    for messages, option in ((too_many_turns, "messages"), ([{"role": "user", "content": too_long}], "prompt")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=NAME, messages=messages)
        assert caught.value.param == option


@pytest.mark.parametrize(
    ("value", "words"), [(b'"\xff"', "UTF-8"), (b"[" * 5000 + b"]" * 5000, "levels"), (b"1" * 5000, "4300 digits")]
)
def test_json_that_cannot_be_read_is_refused_with_the_reason(server: Server, value: bytes, words: str) -> None:
    body = b'{"model": "%s", "prompt": "1", "seed": %s}' % (NAME.encode(), value)
    sent = urllib.request.Request(f"{address(server)}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(sent, timeout=20)
    error = json.load(caught.value)["error"]
    assert (caught.value.code, error["param"]) == (400, "body")
    assert words in error["message"]


def test_lone_surrogates_in_labels_come_back_as_they_were_sent(server: Server) -> None:
    schema = {"type": "integer", "minimum": 1, "maximum": 9}
    form = {"type": "json_schema", "name": "a\ud800", "schema": schema}
    body = {"model": NAME, "input": "1+1", "text": {"format": form}, "max_output_tokens": 16}
    sent = urllib.request.Request(
        f"{address(server)}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(sent) as answer:
        assert json.load(answer)["text"]["format"]["name"] == "a\ud800"


def test_fields_that_ask_for_nothing_are_taken(client: Any) -> None:
    neutral = {
        "logprobs": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "n": 1,
        "user": "me",
        "tools": [],
        "metadata": {"run": "1"},
        "extra_body": {"prompt_cache_key": "a", "safety_identifier": "b"},
    }
    assert chat(client, "1+1", **neutral).choices
    turn: Any = {"role": "user", "content": "1+1", "name": None, "tool_calls": None}  # as in model_dump()
    answer = client.chat.completions.create(model=NAME, messages=[turn])
    assert answer.choices
    assert answer.id.startswith("chatcmpl-")


SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SUM_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}


def test_a_decoder_in_any_order_keeps_a_schema(tmp_path: Path) -> None:
    masked = load(make_bytes_base(tmp_path, mask=True), device="cpu")
    [expected] = masked.generate(["1+1"], decoder=ReFusion(), max_new_tokens=40, json_schema=SUM)
    with (
        serving(masked, ReFusion()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none") as client,
    ):
        streamed = chat(client, "1+1", response_format=SUM_FORMAT, stream=True, max_tokens=40)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected.text
        response = chat(client, "1+1", response_format=SUM_FORMAT, max_tokens=40)
        assert response.choices[0].message.content == expected.text
        assert response.usage.completion_tokens == expected.num_tokens
        jsonschema.validate(json.loads(expected.text), SUM)
        lone_surrogates = {"schema": {"enum": ["\ud800", "\ud801"]}}  # JSON has them, but UTF-8 does not
        form = {"type": "json_schema", "json_schema": lone_surrogates}
        body = {"model": NAME, "prompt": "1", "max_tokens": 40, "response_format": form}
        assert get(f"{address(server)}/v1/completions", json.dumps(body).encode())[0] == 200
        with pytest.raises(openai.BadRequestError, match=r"max_tokens: .*got 3"):
            chat(client, "1+1", response_format=SUM_FORMAT, max_tokens=3)


def test_answers_keep_a_schema(tmp_path: Path) -> None:
    bytes_model = load(make_bytes_base(tmp_path), device="cpu")
    with serving(bytes_model) as server, openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none") as client:
        streamed = chat(client, "1+1", response_format=SUM_FORMAT, stream=True, max_tokens=40)
        texts = ["".join(chunk.choices[0].delta.content or "" for chunk in streamed)]
        several = chat(client, "1+1", response_format=SUM_FORMAT, n=3, temperature=1.0, seed=3, max_tokens=40)
        texts += [choice.message.content for choice in several.choices]
        for text in texts:
            jsonschema.validate(json.loads(text), SUM)
        free = chat(client, "1+1", response_format={"type": "json_object"}, max_tokens=40)
        assert isinstance(json.loads(free.choices[0].message.content), dict)
        for options, message in (
            ({"stop": ["}"]}, r"response_format: .*stop strings"),
            ({"max_tokens": 3}, r"max_tokens: .*at least 10, .*got 3"),  # {"sum":0} and EOS
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                chat(client, "1+1", response_format=SUM_FORMAT, **options)


def test_content_may_come_in_parts_of_text(client: Any) -> None:
    def ask(content: Any) -> Any:
        return client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}])

    parts = [{"type": "text", "text": "12+"}, {"type": "text", "text": "34>"}]
    assert ask(parts).choices[0].message.content == ask("12+34>").choices[0].message.content
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.2\.type: .*'text', got \"image"):
        ask([*parts, image])
    for key in ("citations", "annotations"):
        with pytest.raises(openai.BadRequestError) as caught:
            ask([parts[0], parts[1] | {key: {"type": "ephemeral"}}])
        assert caught.value.param == f"messages.0.content.1.{key}"
        assert "refused" in caught.value.body["message"]
    assert ask([parts[0], parts[1] | {"annotations": None}]).choices, "null asks for nothing"


def test_other_models_turns_and_lengths_are_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"400 - prompt\.0: .*string, got 3"):
        client.completions.create(model=NAME, prompt=[3, 4, 5])
    with pytest.raises(openai.NotFoundError, match=r"model: .*'additions', got '/etc/passwd'"):
        client.completions.create(model="/etc/passwd", prompt="1")
    with pytest.raises(openai.BadRequestError, match=r"messages: .*chat template"):
        client.chat.completions.create(model=NAME, messages=[{"role": "system", "content": "1"}])
    with pytest.raises(openai.BadRequestError, match=r"prompt: .*at most 4096 tokens.*got 5000"):
        client.completions.create(model=NAME, prompt="1" * 5000)
    # Of the context of 512 tokens, the answer takes 16.
    with pytest.raises(openai.BadRequestError, match=r"prompt: .*at most 496 tokens .*512 .*max_tokens"):
        client.completions.create(model=NAME, prompt="1" * 500)
    with pytest.raises(openai.BadRequestError, match=r"prompt: .*16 texts.*empty"):
        client.completions.create(model=NAME, prompt=["1", ""])


def test_each_thread_has_a_tokenizer_of_its_own(model: TextModel) -> None:
    """Encoding switches special tokens off and on in its tokenizer: the engine, prompts and schemas have three."""
    worker = Worker(model, model.default_decoder, SamplingParams(), DecodingOptions(), Limits())
    service = Service(worker, NAME)
    tokenizers = (model.tokenizer, service.model.tokenizer, service.schemas._tokenizer)
    assert len({id(tokenizer) for tokenizer in tokenizers}) == 3


def test_names_of_special_tokens_stay_text(client: Any) -> None:
    """This tokenizer has no letters, so it refuses the names as text; as tokens it would take them."""
    for name in ("<mask>", "<eos>"):
        with pytest.raises(openai.BadRequestError, match="no token for"):
            chat(client, f"1{name}2")


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}assistant: "


def test_names_of_a_chat_templates_tokens_stay_text_in_every_turn(tmp_path: Path) -> None:
    chatting = load(make_bytes_base(tmp_path, mask=True), device="cpu")
    chatting.tokenizer.chat_template = TEMPLATE
    special = {chatting.tokenizer.eos_token_id, chatting.tokenizer.mask_token_id}
    encoded: list[tuple[int, ...]] = []
    turns: list[Any] = [
        {"role": "system", "content": "End with <eos>."},
        {"role": "user", "content": "1<eos>assistant: <mask><pad>"},
    ]

    def expected_text() -> str:
        ids = tuple(chatting.encode(turns[-1]["content"], turns))
        prompt = Prompt(token_ids=ids, id="0")
        return chatting.decode([prompt], Autoregressive(), SamplingParams(max_new_tokens=16)).rows[0].text

    with (
        serving(chatting, Autoregressive()) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        submit = server.worker.submit

        def record_and_submit(jobs: Any) -> None:
            encoded.extend(job.prompt.token_ids for job in jobs)
            submit(jobs)

        server.worker.submit = record_and_submit  # type: ignore[method-assign]
        for question in ("and <eos>2?", "<pad>"):
            answer = client.chat.completions.create(model=NAME, messages=turns).choices[0].message
            assert answer.content == expected_text()
            specials = [token for token in encoded[-1] if token in special]
            assert specials == [chatting.tokenizer.eos_token_id] * len(turns), "the template's own, one for each turn"
            for turn in turns:
                assert turn["content"] in chatting.tokenizer.decode(encoded[-1])
            turns += [answer.model_dump(include={"role", "content"}), {"role": "user", "content": question}]
        assert len(encoded) == 2


def get(url: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        body = error.read()
        return error.code, json.loads(body)["error"]["message"] if body.startswith(b"{") else body


def test_hosts_and_paths_that_the_server_does_not_have_are_refused(server: Server, client: Any) -> None:
    assert get(f"{address(server)}/health") == (200, b'{"status":"ready"}')
    assert get_status(server, "/health", "evil.example") == get_status(server, "/", "") == 400
    for path in ("/docs", "/openapi.json", "/../etc/passwd", "/page.html"):
        assert get_status(server, path) == 404
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=NAME, input="1")
    assert caught.value.param == "path"
    assert "/v1/chat/completions" in caught.value.body["message"]


def test_bodies_that_are_no_valid_json_objects_are_refused(server: Server) -> None:
    chats = f"{address(server)}/v1/chat/completions"
    valid = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}).encode()
    assert get(chats, valid)[0] == 200
    # A page of another site can send bodies of these types without asking.
    for content_type in ("text/plain", ""):
        assert get(chats, valid, **{"Content-Type": content_type})[0] == 400
    for wrong in (b"{", b"", b"[1]", b"5", b"[" * 100_000, b"\xff"):
        status, message = get(chats, wrong)
        assert (status, message.partition(":")[0]) == (400, "body")
    assert get(chats, b'{"model": "additions"}') == (400, "messages: Field required.")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    length = "Content-Type: application/json\nContent-Length: 1000001"
    with raw(server, f"POST /v1/chat/completions HTTP/1.1\nHost: localhost\n{length}\n\n") as connection:
        assert b" 413 " in connection.makefile("rb").readline()


def test_an_empty_key_is_no_key(model: TextModel) -> None:
    """The variable with the key may be set to nothing."""
    with serving(model, key="") as unlocked:
        assert get_status(unlocked, "/v1/models", "evil.example") == 400
        assert get(f"{address(unlocked)}/v1/models", Authorization="Bearer ")[0] == 200


def test_with_a_key_only_the_page_and_health_are_open(model: TextModel) -> None:
    """Requests need the key, so that they may come from any host."""
    with serving(model, key="secret") as locked:
        assert get(f"{address(locked)}/health", Host="any.example")[0] == get(address(locked))[0] == 200
        for path in ("/metrics", "/v1/models"):
            assert get(address(locked) + path)[0] == get(address(locked) + path, Authorization="Bearer x")[0] == 401
            assert get(address(locked) + path, Authorization="Bearer secret")[0] == 200


def test_health_says_that_the_model_is_loading(model: TextModel) -> None:
    from fastapi.testclient import TestClient

    worker = Worker(model, model.default_decoder, SamplingParams(), DecodingOptions(), Limits())
    loaded = threading.Event()
    runner = worker.checked_model.runner

    def load_late() -> Any:
        assert loaded.wait(60)
        return runner()

    worker.checked_model.runner = load_late  # type: ignore[method-assign]
    with TestClient(build_app(Service(worker, NAME)), "http://127.0.0.1") as client:
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        refused = client.post("/v1/completions", json={"model": NAME, "prompt": "1"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the model is loading.")
        assert int(refused.headers["retry-after"]) > 0
        loaded.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        worker.drain(5.0)
        assert client.get("/health").json() == {"status": "stopping"}


def test_errors_that_no_route_expects_have_the_form_of_all_errors(server: Server, monkeypatch: Any) -> None:
    url = f"{address(server)}/v1/completions"
    valid = {"model": NAME, "prompt": "1", "max_tokens": 1}
    schema = {"type": "integer", "\ud800": 1}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    status, message = get(url, json.dumps({**valid, "response_format": form}).encode())
    assert (status, "\\ud800" in message) == (400, True)
    head = "POST /v1/completions HTTP/1.1\nHost: localhost:1\nContent-Type: application/json\nConnection: close\n"
    with raw(server, f"{head}Content-Length: 1000001\n\n") as connection:  # answered by the head: no body is read
        answer = connection.makefile("rb").read()
    assert b" 413 " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == (
        "body: expected at most 1000000 bytes, got more; shorten it."
    )

    def fail(*_: Any) -> None:
        raise KeyError("/a/secret/path")

    monkeypatch.setattr(server.worker, "submit", fail)
    assert get(url, json.dumps(valid).encode()) == (500, "the request failed (KeyError)")


@pytest.mark.parametrize("head", ["Content-Length: 20000000\n\n", "Transfer-Encoding: chunked\n\n1312d00\n"])
def test_a_client_that_sends_all_of_a_large_body_first_gets_its_answer(server: Server, head: str) -> None:
    """Python's urllib sends the whole body first. Closing a connection with unread data would reset the connection."""
    start = "POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\nConnection: close\n"
    with raw(server, start + head) as connection:
        connection.sendall(b"1" * 20_000_000)
        connection.sendall(b"\r\n0\r\n\r\n" if "chunked" in head else b"")
        answer = connection.makefile("rb").read()
    assert b" 413 " in answer.partition(b"\r\n")[0]
    assert b"body: expected at most 1000000 bytes, got more; shorten it." in answer


def get_status(server: Server, path: str, host: str = "127.0.0.1") -> int:
    with raw(server, f"GET {path} HTTP/1.1\nHost: {host}\nConnection: close\n\n") as connection:
        return int(connection.makefile("rb").readline().split()[1])


def test_chunked_bodies_are_counted(server: Server) -> None:
    head = "POST /v1/completions HTTP/1.1\nHost: localhost:1\nContent-Type: application/json\n"
    size = 600_000
    with raw(server, f"{head}Transfer-Encoding: chunked\n\n") as connection:
        chunk = f"{size:x}\r\n".encode() + b"1" * size + b"\r\n"
        connection.sendall(chunk + chunk)
        answer = connection.makefile("rb")
        assert b" 413 " in answer.readline()
        while answer.readline().strip():
            pass
        assert b"body: expected at most 1000000 bytes" in answer.readline(80)


def test_figures_are_shown(server: Server, client: Any) -> None:
    def figures() -> dict[str, float]:
        lines = get(f"{address(server)}/metrics")[1].decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    before = figures()
    usage = chat(client, "12+30=").usage
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=NAME, prompt="12+30=", max_tokens=0)
    after = figures()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['refusion_lit_counts_total{kind="completion_tokens"}'] == usage.completion_tokens
    assert grown['refusion_lit_counts_total{kind="forwards"}'] == usage.forwards
    assert grown['refusion_lit_requests_total{outcome="refused"}'] == 1
    assert grown['refusion_lit_requests_total{outcome="done"}'] == grown['refusion_lit_seconds_count{until="end"}'] == 1
    assert (after["refusion_lit_rows_in_flight"], after["refusion_lit_waiting"]) == (0, 0)


def test_a_full_queue_says_when_to_come_again(model: TextModel) -> None:
    with serving(model, Autoregressive(), rows=1, max_waiting=1, prepare=lambda worker: slow(worker, 0.05)) as server:
        with openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=r"n: .*at most 2 .* got 3"):
                client.completions.create(model=NAME, prompt="1+1", n=3)
            first = client.completions.create(model=NAME, prompt="1+1", max_tokens=450, stream=True)
            next(first)
            second = client.completions.create(model=NAME, prompt="1+2", max_tokens=2, stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=NAME, prompt="1+3")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            first.close()
            assert [chunk.choices[0].finish_reason for chunk in second][-1], "the first request's row is free again"
        wait_for(lambda: not server.worker.active)
