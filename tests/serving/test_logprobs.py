"""Log-probabilities in answers and streams, in the form that OpenAI's client reads."""

from __future__ import annotations

from typing import Any

import pytest

from refusion_lit.decoding import Autoregressive, Decoder, LLaDA, ReFusion
from refusion_lit.text_model import TextModel
from support.servers import NAME, address, serving

openai = pytest.importorskip("openai")
QUERY = "12+34,56+78>"


def client(server: Any) -> Any:
    return openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    "decoder", [Autoregressive(), ReFusion(slot_size=4)], ids=lambda decoder: type(decoder).__name__
)
def test_answers_and_streams_have_those_of_python(model: TextModel, decoder: Decoder) -> None:
    [expected] = model.generate([QUERY], decoder=decoder, max_new_tokens=24, num_top_logprobs=2)
    entries = [entry for entry in expected.logprobs if entry is not None][:-1]  # without the end of the response
    chat: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": QUERY}], "max_tokens": 24}
    with serving(model, decoder) as server:
        api = client(server).chat.completions
        answer = api.create(**chat, logprobs=True, top_logprobs=2).choices[0]
        pieces = [chunk.choices[0] for chunk in api.create(**chat, logprobs=True, top_logprobs=2, stream=True)]
        plain = api.create(**chat).choices[0]
    assert plain.logprobs is None
    assert plain.message.content == answer.message.content == expected.text
    streamed = [item for piece in pieces if piece.logprobs for item in piece.logprobs.content]
    for tokens in (answer.logprobs.content, streamed):
        assert "".join(item.token for item in tokens) == expected.text
        assert [item.logprob for item in tokens] == pytest.approx([entry.logprob for entry in entries], abs=1e-5)
        assert [item.forward for item in tokens] == [entry.forward for entry in entries]
        assert [bytes(item.bytes).decode() for item in tokens] == [item.token for item in tokens]
        tops = [[(top.token, top.logprob) for top in item.top_logprobs] for item in tokens]
        for top, entry in zip(tops, entries, strict=True):
            assert [token for token, _ in top] == [model.token_text(token) for token, _ in entry.top]
            assert [logprob for _, logprob in top] == pytest.approx([logprob for _, logprob in entry.top], abs=1e-5)
    # Every chunk of the stream has the tokens of its text.
    for piece in pieces:
        if piece.delta.content and piece.logprobs:
            assert "".join(item.token for item in piece.logprobs.content) == piece.delta.content


def test_completions_have_offsets(model: TextModel) -> None:
    [expected] = model.generate([QUERY], decoder=Autoregressive(), max_new_tokens=24, num_top_logprobs=1)
    with serving(model, Autoregressive()) as server:
        api = client(server).completions
        options: dict[str, Any] = {"model": NAME, "prompt": QUERY, "max_tokens": 24, "logprobs": 1}
        logprobs = api.create(**options).choices[0].logprobs
        chunks = [chunk.choices[0].logprobs for chunk in api.create(**options, stream=True)]
    streamed = {
        name: [value for chunk in chunks for value in getattr(chunk, name)] for name in ("tokens", "text_offset")
    }
    assert "".join(logprobs.tokens) == expected.text
    assert [expected.text[offset:][:1] for offset in logprobs.text_offset] == [token[:1] for token in logprobs.tokens]
    assert streamed == {"tokens": logprobs.tokens, "text_offset": logprobs.text_offset}
    expected_logprobs = [entry.logprob for entry in expected.logprobs if entry][:-1]  # without the end of the response
    assert logprobs.token_logprobs == pytest.approx(expected_logprobs, abs=1e-5)
    assert [max(top.values()) for top in logprobs.top_logprobs] == pytest.approx(logprobs.token_logprobs)


def test_stop_strings_and_choices(model: TextModel) -> None:
    chat: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": QUERY}], "max_tokens": 24}
    with serving(model, LLaDA(steps=24)) as server:
        api = client(server).chat.completions
        options: dict[str, Any] = {"logprobs": True, "n": 2, "temperature": 1.0, "seed": 1, "stop": "4"}
        answer = api.create(**chat, **options)
        for choice in answer.choices:
            text = "".join(item.token for item in choice.logprobs.content)
            assert text.startswith(choice.message.content)
            assert "4" not in text[:-1]


def test_alternatives_without_text_have_no_bytes(model: TextModel) -> None:
    """A vocabulary may have rows that no text has; among all tokens, there are some."""
    turns: list[Any] = [{"role": "user", "content": QUERY}]
    with serving(model) as server:
        options: dict[str, Any] = {"model": NAME, "messages": turns, "logprobs": True, "top_logprobs": 20}
        [choice] = client(server).chat.completions.create(**options).choices
        alternatives = choice.logprobs.content[0].top_logprobs
        without_text = [entry.bytes for entry in alternatives if not entry.token]
        assert without_text
        assert without_text == [[]] * len(without_text)
        streamed = [*client(server).chat.completions.create(**options, stream=True)]
        entries = [entry for chunk in streamed if chunk.choices[0].logprobs
                   for entry in chunk.choices[0].logprobs.content or []]  # fmt: skip
        assert entries == choice.logprobs.content


@pytest.mark.parametrize("wrong", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": "yes"}])
def test_wrong_values_are_refused(model: TextModel, wrong: dict[str, Any]) -> None:
    with serving(model) as server, pytest.raises(openai.BadRequestError) as error:
        client(server).chat.completions.create(model=NAME, messages=[{"role": "user", "content": QUERY}], **wrong)
    assert "logprobs" in error.value.message
