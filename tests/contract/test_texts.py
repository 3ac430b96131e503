"""The text of a response continues its prompt: prompt + text is the text of all tokens, however it is asked for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.data.detokenizer import Detokenizer
from refusion_lit.data.encoding import encode_within
from refusion_lit.decoding import Autoregressive, Generation, TextStream, cut_at_stop
from refusion_lit.text_model import TextModel
from refusion_lit.types import SamplingParams
from support.servers import address, serving
from support.tokenizer_zoo import KINDS, make_model, make_tokenizer

PROMPT = "The capital of France"
ANSWERS = [" is Paris.", "\n    b = a\n    return b", "\nA 世世界 é \U0001f468 naïve x", "ish"]
DETOKENIZERS = {kind: Detokenizer(make_tokenizer(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextModel]:
    return {kind: load(make_model(kind, tmp_path_factory.mktemp(kind)), device="cpu") for kind in KINDS}


def script(model: TextModel, answer: list[int], start: int) -> None:
    """Let a model write an answer, then EOS, from a position on.

    The first number of a hidden state is the position that its logits predict, so that the head knows what to write.
    """
    backbone = model.backbone
    make_body = backbone.runner
    ids = torch.tensor([*answer, *backbone.special_tokens.eos_token_ids[:1]])

    def run_body(
        run: Callable[..., torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any = None
    ) -> torch.Tensor:
        hidden = torch.zeros_like(run(tokens, positions, mask, cache))
        hidden[..., 0] = positions + 1.0
        return hidden

    def run_head(hidden: torch.Tensor) -> torch.Tensor:
        place = (hidden[..., 0].round().long() - start).clamp(0, len(answer))
        return 20.0 * torch.nn.functional.one_hot(ids[place], len(model.tokenizer)).float()

    backbone.runner = lambda: partial(run_body, make_body())  # type: ignore[method-assign]
    backbone.head_runner = lambda: run_head  # type: ignore[method-assign]


def continuation(model: TextModel, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and the tokens that an answer adds."""
    before = model.encode(PROMPT)
    whole = model.encode(PROMPT + answer)
    assert whole[: len(before)] == before, "the answers begin at tokens"
    return before, whole[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ANSWERS[:3])
def test_all_doors_return_the_text_that_continues_the_prompt(
    kind: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    folder = make_model(kind, tmp_path / "model")
    model = load(folder, device="cpu")
    before, after = continuation(model, answer)
    script(model, after, len(before))

    def load_scripted(*args: Any, **options: Any) -> TextModel:
        load(*args, **options)  # checks the prompts
        return model

    monkeypatch.setattr("refusion_lit.checkpoints.models.load", load_scripted)
    [row] = model.generate([PROMPT], decoder=Autoregressive(), max_new_tokens=80)
    assert row.text == answer
    options = ["--ckpt_path", str(folder), "--decoder", "Autoregressive", "--max_new_tokens", "80"]
    assert main(["generate", *options, "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out == answer + "\n"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    assert main(["generate", *options, "--prompts", str(prompts)]) == 0
    assert json.loads(capsys.readouterr().out)["response"] == answer
    with serving(model, Autoregressive()) as server:
        for stream in (False, True):
            body = {"model": "additions", "prompt": PROMPT, "max_tokens": 80, "stream": stream}
            head = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address(server)}/v1/completions", json.dumps(body).encode(), head)
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read().decode()
            events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_at_the_beginning_of_the_response_is_found(kind: str, models: dict[str, TextModel]) -> None:
    model = models[kind]
    before, after = continuation(model, " is Paris.")
    script(model, after, len(before))
    for stop, text in ((" is", ""), (" Paris", " is"), ("s P", " i")):
        sampling = SamplingParams(max_new_tokens=40, stop=(stop,))
        [row] = model.generate([PROMPT], decoder=Autoregressive(), sampling=sampling)
        assert (row.text, row.finish_reason) == (text, "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_names_a_special_token_is_found(kind: str, models: dict[str, TextModel]) -> None:
    model = models[kind]
    name = {"llama2": "<s>", "llama3": "<|eot_id|>", "gpt2": None, "qwen": "<|im_end|>", "gemma": "<end_of_turn>"}[kind]
    if name is None:
        return  # this tokenizer has no special token besides EOS
    before, after = continuation(model, " is Paris")
    token = model.tokenizer.convert_tokens_to_ids(name)
    script(model, [*after, token, *after, token], len(before))  # type: ignore[list-item]
    for stop in ((name,), ("is Rome", name), (f"Paris{name}", "never")):
        sampling = SamplingParams(max_new_tokens=40, stop=stop)
        [row] = model.generate([PROMPT], decoder=Autoregressive(), sampling=sampling)
        assert row.finish_reason == "stop"
        assert row.text == (" is " if stop[0].startswith("Paris") else " is Paris")
    [row] = model.generate([PROMPT], decoder=Autoregressive(), max_new_tokens=40)
    assert name not in row.text


@pytest.mark.parametrize("kind", ["llama3", "llama2"])
def test_names_of_special_tokens_are_text_only_where_a_stop_string_reaches(
    kind: str, models: dict[str, TextModel]
) -> None:
    """Transformers and lm-evaluation-harness look for stop strings in the text with the names of special tokens.

    Here the model writes " is Paris", a special token and ".". A stop string may lie within the token's name, or begin
    before it, or end behind it. Only then the name counts as text.
    """
    model = models[kind]
    name = {"llama2": "<s>", "llama3": "<|eot_id|>"}[kind]
    before, after = continuation(model, " is Paris")
    token: int = model.tokenizer.convert_tokens_to_ids(name)  # type: ignore[assignment]
    tokens = [*after, token, *encode_within(model.tokenizer, ".")]
    half = name[: len(name) // 2]
    cases = {
        f"{name} never": " is Paris.", half: " is Paris", name[1:3]: " is Paris", f"s{half}": " is Pari",
        f"{name}.": " is Paris", f"{name[-1]}.": " is Paris", "s.": " is Pari",
    }  # fmt: skip
    for stop, expected in cases.items():
        sampling = SamplingParams(max_new_tokens=40, stop=(stop,))
        stream = TextStream(partial(model.detokenize, after=before, stop=(stop,), is_growing=True), sampling)
        pieces = [stream.piece(tokens[:num]) for num in range(1, len(tokens) + 1)]
        final = cut_at_stop(model.detokenize(tokens, before, (stop,)), (stop,))
        assert final == expected, stop
        assert "".join([*pieces, stream.rest(final)]) == expected, stop
        script(model, tokens, len(before))
        [row] = model.generate([PROMPT], decoder=Autoregressive(), sampling=sampling)
        assert (row.text, row.finish_reason == "stop") == (expected, expected != " is Paris."), stop


def stream_text(detokenize: Detokenizer, tokens: list[int], after: list[int]) -> str:
    """Return what a stream shows of tokens that come one by one."""
    stream = TextStream(lambda ids: detokenize(ids, after), SamplingParams())
    pieces = [stream.piece(tokens[:num]) for num in range(1, len(tokens) + 1)]
    return "".join([*pieces, stream.rest(detokenize(tokens, after))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_response_cut_within_a_character_keeps_the_complete_ones(kind: str, answer: str) -> None:
    detokenize, tokenizer = DETOKENIZERS[kind], make_tokenizer(kind)
    before: list[int] = tokenizer(PROMPT)["input_ids"]  # type: ignore[assignment]
    whole: list[int] = tokenizer(PROMPT + answer)["input_ids"]  # type: ignore[assignment]
    num_same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    prompt, response = whole[:num_same], whole[num_same:]
    text = detokenize(response, prompt)
    assert detokenize(prompt) + text == PROMPT + answer
    for num in range(len(response) + 1):
        part = detokenize(response[:num], prompt)
        assert text.startswith(part.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert part.count("\N{REPLACEMENT CHARACTER}") <= 3  # a cut character has at most 3 of its 4 bytes
        assert stream_text(detokenize, response[:num], prompt) == part
    lengths = [len(detokenize(response[:num], prompt).rstrip("\N{REPLACEMENT CHARACTER}")) for num in range(9)]
    assert lengths == sorted(lengths), "no complete character is lost"


TEXTS = st.text(st.sampled_from(" \nab世é.Pi\U0001f468"), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, answer=TEXTS)
def test_prompt_and_text_are_the_text_of_all_tokens(kind: str, prompt: str, answer: str) -> None:
    tokenizer, detokenize = make_tokenizer(kind), DETOKENIZERS[kind]
    whole: list[int] = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    for num in range(len(whole) + 1):
        before = detokenize(whole[:num])
        if "\N{REPLACEMENT CHARACTER}" not in before:
            assert before + detokenize(whole[num:], whole[:num]) == tokenizer.decode(whole)


def test_broken_bytes_in_the_middle_cost_no_other_characters() -> None:
    tokenizer, detokenize = make_tokenizer("llama2"), DETOKENIZERS["llama2"]
    ids: list[int] = tokenizer("x世 é", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    first_byte = tokenizer.convert_ids_to_tokens(ids).index("<0xE4>")  # of the three bytes of 世
    del ids[first_byte + 2]
    assert detokenize(ids) == "x\N{REPLACEMENT CHARACTER} é"


def test_ids_are_decoded_alone_unless_they_continue_a_text(models: dict[str, TextModel]) -> None:
    model = models["llama2"]
    before, after = continuation(model, " is Paris.")
    script(model, after, len(before))

    def ask(**options: Any) -> Generation:
        return model.generate_ids([before], decoder=Autoregressive(), max_new_tokens=40, **options)[0]

    assert ask().text == "is Paris."
    assert ask(continues_text=True).text == " is Paris."
