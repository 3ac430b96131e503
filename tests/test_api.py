"""The Python interface refuses unknown options and arguments of another type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import refusion_lit
from refusion_lit import TextModel
from refusion_lit.decoding import GenerationCallback, ReFusion, SelfSpeculative, decode
from refusion_lit.traces.document import record_trace
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams

MODEL = Path(__file__).parent / "goldens" / "models" / "additions-clean"
QUERY = "12+34,56+78>"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return refusion_lit.load(MODEL)


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda model, **options: model.generate([QUERY], **options),
    "templates": lambda model, **options: model.generate([QUERY], templates=[None], **options),
    "generate_ids": lambda model, **options: model.generate_ids([model.encode(QUERY)], **options),
    "decode": lambda model, **options: model.decode(
        [Prompt(token_ids=(4, 5), id="a")], ReFusion(), SamplingParams(max_new_tokens=4), **options
    ),
}


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("name", ["num_beams", "max_batch_size", "detokenize", "temperature"])
def test_an_unknown_option_is_refused_by_name(model: TextModel, method: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"keyword argument '{name}'"):
        CALLS[method](model, **{name: None})


def test_a_sampling_option_is_refused_with_where_it_belongs(model: TextModel) -> None:
    with pytest.raises(TypeError, match=r"'top_p'.*sampling=SamplingParams"):
        model.generate([QUERY], top_p=0.9)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_tokens", "max_new_tokens"),
        ("temprature", "temperature"),
        ("batchsize", "batch_size"),
        ("template", "templates"),
        ("callback", "callbacks"),
    ],
)
@pytest.mark.parametrize("method", CALLS)
def test_an_option_that_is_misspelt_is_refused_with_the_nearest(
    model: TextModel, method: str, name: str, near: str
) -> None:
    with pytest.raises(TypeError, match=rf"'{name}'.*{near}"):
        CALLS[method](model, **{name: 4})


@pytest.mark.parametrize(("name", "near"), [("calback", "callbacks"), ("batchsize", "batch_size"), ("trce", "trace")])
def test_a_misspelt_argument_of_the_function_decode_is_refused_with_the_nearest(
    model: TextModel, name: str, near: str
) -> None:
    wrong: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=rf"'{name}'.*{near}"):
        decode(model.backbone, ReFusion(), [], SamplingParams(), **wrong)


def test_a_model_is_printed_with_its_size(model: TextModel) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.backbone.parameters())
    assert f"{num_parameters:,} parameters, float32 on cpu" in repr(model)


def test_all_options_are_taken(model: TextModel) -> None:
    values: dict[str, Any] = {
        "decoder": ReFusion(slot_size=8), "max_new_tokens": 64, "sampling": SamplingParams(max_new_tokens=64),
        "ids": ["a"], "templates": [None], "batch_size": 2, "max_tokens_per_forward": 64, "callbacks": (),
        "allow_mismatch": False, "trace": False, "share_prefixes": False, "max_cache_tokens": 128, "kept": None,
        "json_schema": None,
    }  # fmt: skip
    assert values.keys() >= DecodingOptions.__dataclass_fields__.keys()
    assert model.generate([QUERY], **values)[0].text == "12+34=46;56+78=134;"


def test_queries_may_come_from_an_iterator(model: TextModel) -> None:
    [row] = model.generate((query for query in [QUERY]), max_new_tokens=8)
    assert row.text == model.generate([QUERY], max_new_tokens=8)[0].text


def test_names_of_prompts_are_texts_whatever_their_type(model: TextModel) -> None:
    """Names key the noise: a number gives the same sample as a text of its digits."""
    sampling = SamplingParams(max_new_tokens=16, temperature=3.0)
    decoder = SelfSpeculative(slot_size=8)
    prompts = [model.encode(QUERY)] * 3

    def tokens(**options: Any) -> list[list[int]]:
        return [
            row.token_ids for row in model.generate_ids(iter(prompts), sampling=sampling, decoder=decoder, **options)
        ]

    expected = tokens()
    assert expected[0] != expected[1]
    assert tokens(ids=[0, 1, 2]) == tokens(ids=np.array(["0", "1", "2"])) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (QUERY, "prompts: expected a list of Prompt, got '12"),
        (Prompt(token_ids=(4, 99), id="a"), "prompt a: expected token ids below 19, .*, got 99"),
        (Prompt(token_ids=(4,), id="a", given=(-1, None)), "prompt a: expected token ids below 19, .*, got -1"),
    ],
)
def test_prompts_of_unknown_tokens_are_refused(model: TextModel, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        model.decode([prompt], ReFusion(), SamplingParams(max_new_tokens=8))


@pytest.mark.parametrize("stop", [";", None, (text for text in ";"), [""], [3]])
def test_stop_strings_are_a_list_of_texts(stop: Any) -> None:
    """A generator would be empty after its check, and stop nothing."""
    with pytest.raises(ValueError, match=r"^stop: expected a list of texts"):
        SamplingParams(stop=stop)


def test_a_trace_is_that_of_the_answer(model: TextModel) -> None:
    row, trace = record_trace(model, QUERY, ReFusion(), SamplingParams(max_new_tokens=8))
    assert (row.num_tokens, trace.token_ids) == (8, tuple(row.token_ids))


def test_torch_types_are_taken(model: TextModel) -> None:
    assert refusion_lit.load(MODEL, dtype=torch.bfloat16).backbone.head.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^dtype: expected one of auto, float32, .*, got 'float8'"):
        refusion_lit.load(MODEL, dtype="float8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": {"max_new_tokens": 8}}, "sampling: expected an instance of SamplingParams"),
        ({"callbacks": [print]}, "callbacks: expected a list"),
        ({"callbacks": GenerationCallback()}, "callbacks: expected a list"),
        ({"decoder": ReFusion}, "decoder: expected an instance of a decoder class"),
        ({"kept": True}, "kept: expected an instance of KeptCache"),
        ({"templates": iter([None])}, "templates: expected a list"),
    ],
)
def test_arguments_of_another_type_are_refused(model: TextModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        model.generate_ids([model.encode(QUERY)], **options)


@pytest.mark.parametrize("queries", [QUERY, None, [3]])
def test_queries_that_are_no_list_of_texts_are_refused(model: TextModel, queries: Any) -> None:
    with pytest.raises(ValueError, match=r"^queries: expected a list of texts"):
        model.generate(queries)


def test_overrides_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^overrides: expected a BackboneConfig, got {'attention'"):
        refusion_lit.load(MODEL, overrides={"attention": "causal"})  # type: ignore[arg-type]


def test_a_source_that_is_no_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^source: expected .*, got None"):
        refusion_lit.load(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["a", None, 1.5, True])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"^seed: expected an integer, got"):
        SamplingParams(seed=seed)
