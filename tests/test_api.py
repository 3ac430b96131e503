"""The Python interface refuses unknown options by the method's name, and takes those that it lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import refusion_lit
from refusion_lit import TextModel
from refusion_lit.decoding import ReFusion
from refusion_lit.types import Prompt, SamplingParams

MODEL = Path(__file__).parent / "goldens" / "models" / "additions-clean"
QUERY = "12+34,56+78>"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return refusion_lit.load(MODEL)


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda model, **options: model.generate([QUERY], **options),
    "infill": lambda model, **options: model.infill([QUERY], [None], **options),
    "generate_ids": lambda model, **options: model.generate_ids([model.encode(QUERY)], **options),
    "decode": lambda model, **options: model.decode(
        [Prompt(token_ids=(4, 5), id="a")], ReFusion(), SamplingParams(max_new_tokens=4), **options
    ),
}


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("name", ["num_beams", "max_batch_size", "detokenize"])
def test_an_unknown_option_is_refused_by_the_methods_name(model: TextModel, method: str, name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{method}: unknown option {name}; expected one of .*batch_size, max_tokens_"
    ):
        CALLS[method](model, **{name: None})


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "stop"])
def test_a_sampling_option_is_refused_with_where_it_belongs(model: TextModel, name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"unknown option {name}; .*; pass it as sampling=SamplingParams\({name}=...\)"
    ):
        CALLS["generate"](model, **{name: 1})


def test_the_options_that_the_message_lists_are_taken(model: TextModel) -> None:
    with pytest.raises(TypeError) as refused:
        model.generate([QUERY], num_beams=2)
    listed = str(refused.value).partition("expected one of ")[2].removesuffix(".").split(", ")
    values: dict[str, Any] = {
        "decoder": ReFusion(slot_size=8), "max_new_tokens": 64, "sampling": SamplingParams(max_new_tokens=64),
        "ids": ["a"], "templates": [None], "batch_size": 2, "max_tokens_per_forward": 64, "callbacks": (),
        "allow_mismatch": False, "trace": False, "share_prefixes": False, "max_cache_tokens": 128, "kept": None,
    }  # fmt: skip
    assert set(listed) == set(values)
    assert model.generate([QUERY], **values)[0].text == "12+34=46;56+78=134;"
