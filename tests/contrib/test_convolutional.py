"""Convolutional decoding beside a plain loop, and the options that it refuses."""

from __future__ import annotations

from math import tanh
from typing import Any

import pytest

from refusion_lit.contrib import Convolutional
from refusion_lit.decoding import LLaDA
from refusion_lit.types import Prompt, SamplingParams
from support.fakes import SPECIAL
from support.reference_masked import EOS, PROMPTS, llada, run
from support.slow_decoding import cut


@pytest.mark.parametrize(("kernel_size", "steps"), [(1, 5), (2, 16), (3, 5), (6, 16), (99, 5)])
def test_a_plain_loop_gives_the_same(kernel_size: int, steps: int) -> None:
    rows = run(Convolutional(steps=steps, kernel_size=kernel_size), 16, PROMPTS[:2])
    for prompt, row in zip(PROMPTS[:2], rows, strict=True):
        assert row.token_ids == cut(llada(prompt, 16, steps, 16, kernel=kernel_size), [EOS])


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 9])
def test_a_place_is_weighed_by_the_known_tokens_in_its_window(kernel_size: int) -> None:
    prompt = Prompt(token_ids=(3, 4), id="0", given=(None, 5, None, None, None, 6, 7, None))
    decoder = Convolutional(kernel_size=kernel_size)
    state = decoder.begin(prompt, SamplingParams(max_new_tokens=5), SPECIAL)
    known, masks = [-2, -1, 1, 5, 6], [0, 2, 3, 4, 7]
    counts = [sum(abs(place - other) <= kernel_size // 2 for other in known) for place in masks]
    assert decoder.weigh(state, masks, [0.5] * 5) == pytest.approx([0.5 * tanh(count) for count in counts])


def test_a_window_over_everything_changes_nothing_but_a_narrow_one_does() -> None:
    decoders = (Convolutional(steps=4, kernel_size=999), LLaDA(steps=4), Convolutional(steps=4, kernel_size=2))
    wide, plain, narrow = ([row.token_ids for row in run(decoder, 16)] for decoder in decoders)
    # tanh of the whole prompt and more is 1 but for rounding.
    assert wide == plain
    assert narrow != plain


@pytest.mark.parametrize("options", [{"block_length": 8}, {"order": "random"}, {"order": "origin"}, {"kernel_size": 0}])
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kernel_size: expected"):
        Convolutional(**options)
