"""The sampler of convolutional decoding as a plain loop, and what its scaling keeps."""

from __future__ import annotations

import math

import pytest

from reference_masked import EOS, PROMPTS, draw, fed, forward, model, unmasked
from refusion_lit.decoding import LLaDA, decode
from refusion_lit.engine.requests import Reading
from refusion_lit.types import Prompt, SamplingParams
from refusion_lit.utils.keys import uniform_scalar
from slow_decoding import cut

LENGTH = 16


def convolutional(prompt: tuple[int, ...], name: str, steps: int, kernel: int, top_k: int | None) -> list[int]:
    """Unmask by chance: q(v) = p(v) s c dt for the best tokens, q(mask) = t - dt, c so that s costs no unmasking."""
    canvas: list[int | None] = [None] * LENGTH
    times = [1 - i / steps * (1 - 1e-3) for i in range(steps + 1)]
    for step in range(steps):
        values, _ = forward(fed(prompt, canvas))
        known = [True] * len(prompt) + [token is not None for token in canvas]
        masked = [place for place in range(LENGTH) if canvas[place] is None]
        near, tokens = {}, {}
        for place in masked:
            row, here, half = values[len(prompt) + place], len(prompt) + place, kernel // 2
            best = row.softmax(-1).topk(top_k or len(row)).values
            near[place] = math.tanh(sum(known[max(here - half, 0) : here + half + 1])) * float(best.sum())
            tokens[place] = draw(row)
        dt, after = times[step] - times[step + 1], times[step + 1]
        scale = len(masked) / sum(near.values()) if sum(near.values()) else 0.0
        for place in masked:
            q = near[place] * scale * dt
            chance = 1.0 if step == steps - 1 else q / (q + after)
            if uniform_scalar("order", 0, name, step, place) < chance:
                canvas[place] = tokens[place]
    return [token for token in canvas if token is not None]


@pytest.mark.parametrize("kernel_size", [1, 2, 5, 99])
@pytest.mark.parametrize(("steps", "top_k"), [(4, 1), (12, 3), (16, None)])
def test_the_text_is_that_of_a_plain_loop(kernel_size: int, steps: int, top_k: int | None) -> None:
    decoder = LLaDA(order="origin", steps=steps, kernel_size=kernel_size)
    named = [Prompt(token_ids=prompt, id=str(i)) for i, prompt in enumerate(PROMPTS)]
    rows = decode(model(), decoder, named, SamplingParams(max_new_tokens=LENGTH, top_k=top_k), batch_size=3).rows
    for prompt, row in zip(named, rows, strict=True):
        found = convolutional(prompt.token_ids, prompt.id, steps, kernel_size, top_k)
        assert row.token_ids == cut(found, [EOS])
        assert row.num_forwards == steps


def test_a_window_over_everything_is_the_plain_sampler() -> None:
    named = [Prompt(token_ids=prompt, id=str(i)) for i, prompt in enumerate(PROMPTS)]
    texts = [
        [row.token_ids for row in decode(model(), decoder, named, SamplingParams(max_new_tokens=LENGTH)).rows]
        for decoder in (LLaDA(order="origin", steps=8), LLaDA(order="origin", steps=8, kernel_size=999))
    ]
    assert texts[0] == texts[1]


def test_masks_far_from_the_text_stay_and_as_many_are_unmasked() -> None:
    """With a window of 3 only the first mask has a neighbour: the chance of all others is its own."""
    size, num_prompts = 40, 3000
    reading = Reading(tokens=[5] * size, probabilities=[0.5] * size, statistics={"kept": [1.0] * size})
    plain, near = (
        [unmasked(LLaDA(order="origin", steps=size, kernel_size=kernel), reading, str(i)) for i in range(num_prompts)]
        for kernel in (None, 3)
    )
    assert {place for places in near for place in places} == {0}
    counts = [sum(map(len, places)) / num_prompts for places in (plain, near)]
    # One a step is expected; a single mask gets share * size / (share * size + 1 - share), about a half, of it.
    assert counts[0] == pytest.approx(1.0, abs=0.08)
    assert counts[1] == pytest.approx(1 / (1 + 1 - 1 / size), abs=0.04)
