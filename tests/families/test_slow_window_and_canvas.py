"""Random models, prompts and settings: WeDLM and UniformDiffusion give the texts and forwards of slow programs.

The programs follow the rules of Tencent's two programs and of transformers' DiffusionGemma, without a cache.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import Decoder, WeDLM, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.example_counts import examples
from support.fakes import MASK, SPECIAL, VOCAB
from support.replayed_canvas import DRAWS, Draws, Replayed
from support.slow_decoding import BANNED, compute, cut, random_backbone

ENDS = SPECIAL.eos_token_ids
WORDS = [token for token in range(SPECIAL.vocab_size) if token not in {*BANNED, *ENDS}]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(tuple), min_size=1, max_size=4)
Text = tuple[int, ...]


TRAITS = ModelTraits(predictions=("mask", "next_token", "visible"))
MODELS = st.builds(
    random_backbone, seed=st.integers(0, 9), scale=st.sampled_from([0.3, 1.0, 3.0]), traits=st.just(TRAITS)
)


def decode_batch(model: Backbone, decoder: Decoder, prompts: list[Text], length: int) -> list[Any]:
    batch = [Prompt(token_ids=tokens, id=str(i)) for i, tokens in enumerate(prompts)]
    return decode(model, decoder, batch, SamplingParams(max_new_tokens=length), batch_size=3).rows


# WeDLM.


def read_masks(model: Backbone, text: dict[int, int], masks: list[int]) -> Tensor:
    """Return log-probabilities (mask, vocabulary) at masks, which follow all known tokens in the causal order."""
    order = [*sorted(text), *masks]
    tokens = [text.get(place, MASK) for place in order]
    visible = torch.ones(len(order), len(order), dtype=torch.bool).tril()
    return compute(model, tokens, order, visible)[len(text) :]


def slide(
    model: Backbone, prompt: Text, length: int, *, size: int, threshold: float | None, penalty: float
) -> tuple[list[int], int]:
    """Decode with WeDLM's sliding window, which reaches ``size`` places from the first mask.

    A forward pass fills the masks whose entropy plus ``penalty`` times the distance from the first mask is below the
    threshold, or else the mask with the lowest sum.
    """
    text, num_forwards, start = dict(enumerate(prompt)), 0, len(prompt)
    while True:
        first = next(place for place in count(start) if place not in text)
        known = [text[place] for place in range(start, first)]
        if first >= start + length or {*ENDS} & {*known}:
            return cut(known[:length], ENDS), num_forwards
        masks = [place for place in range(first, min(first + size, start + length + size)) if place not in text]
        scores = read_masks(model, text, masks)
        num_forwards += 1
        costs = [
            -float((score.exp() * score).sum()) + penalty * (place - first)
            for place, score in zip(masks, scores, strict=True)
        ]
        chosen = [i for i, cost in enumerate(costs) if threshold is not None and cost < threshold]
        for i in chosen or [costs.index(min(costs))]:
            text[masks[i]] = int(scores[i].argmax())


def fill_blocks(
    model: Backbone, prompt: Text, length: int, *, size: int, threshold: float | None, temperature: float
) -> tuple[list[int], int]:
    """Decode with WeDLM's blocks, one after another.

    A forward pass fills the masks whose probability (of logits divided by the temperature) reaches the threshold, or
    else the most probable mask.
    """
    text, num_forwards, start = dict(enumerate(prompt)), 0, len(prompt)
    for begin in range(start, start + length, size):
        block = range(begin, min(begin + size, start + length))
        while masks := [place for place in block if place not in text]:
            known = [text[place] for place in range(start, masks[0])]
            if {*ENDS} & {*known}:
                return cut(known, ENDS), num_forwards
            scores = read_masks(model, text, masks)
            num_forwards += 1
            best = (scores / temperature).softmax(-1).max(-1).values.tolist()
            chosen = [i for i, value in enumerate(best) if threshold is not None and value >= threshold]
            for i in chosen or [best.index(max(best))]:
                text[masks[i]] = int(scores[i].argmax())
    return cut([text[start + i] for i in range(length)], ENDS), num_forwards


@settings(max_examples=examples(120), deadline=None)
@given(
    model=MODELS, prompts=TEXTS, length=st.integers(1, 18), size=st.integers(1, 9),
    threshold=st.sampled_from([None, 0.3, 1.0, 1.7, 9.0]), penalty=st.sampled_from([0.0, 0.02, 0.3]),
)  # fmt: skip
@torch.no_grad()
def test_wedlms_sliding_window_equals_the_slow_program(
    model: Backbone, prompts: list[Text], length: int, size: int, threshold: float | None, penalty: float
) -> None:
    decoder = WeDLM(window_size=size, entropy_threshold=threshold, position_penalty=penalty)
    for tokens, row in zip(prompts, decode_batch(model, decoder, prompts, length), strict=True):
        expected = slide(model, tokens, length, size=size, threshold=threshold, penalty=penalty)
        assert (row.token_ids, row.num_forwards) == expected


@settings(max_examples=examples(120), deadline=None)
@given(
    model=MODELS, prompts=TEXTS, length=st.integers(1, 18), size=st.integers(1, 9),
    threshold=st.sampled_from([None, 0.0, 0.3, 0.6, 0.9]), temperature=st.sampled_from([0.25, 0.5, 1.0, 1.5, 4.0]),
)  # fmt: skip
@torch.no_grad()
def test_wedlms_blocks_equal_the_slow_program(
    model: Backbone, prompts: list[Text], length: int, size: int, threshold: float | None, temperature: float
) -> None:
    options = {"confidence_threshold": threshold, "confidence_temperature": temperature}
    decoder = WeDLM(selection="confidence", window_size=size, **options)
    rule = {"size": size, "threshold": threshold, "temperature": temperature}
    for tokens, row in zip(prompts, decode_batch(model, decoder, prompts, length), strict=True):
        assert (row.token_ids, row.num_forwards) == fill_blocks(model, tokens, length, **rule)


# UniformDiffusion, on a model that reads a canvas without self-conditioning.


def denoise(
    model: Backbone, prompt: Text, length: int, options: dict[str, Any], generator: torch.Generator
) -> tuple[list[int], int, Draws]:
    """Denoise canvases of uniform noise; return the text, the number of forwards, and what was drawn."""
    size, num_steps, num_repeats = options["canvas_length"], options["num_steps"], options["stability_threshold"]
    text: list[int] = []
    noise, samples, num_forwards = [], [], 0

    def draw_noise() -> list[int]:
        noise.append(torch.randint(0, VOCAB, (size,), generator=generator).tolist())
        return noise[-1]

    while len(text) < length and not {*ENDS} & {*text}:
        known = [*prompt, *text]
        num_forwards += 1  # reads the text
        canvas, drafts = draw_noise(), []
        total = len(known) + size
        visible = torch.ones(total, total, dtype=torch.bool).tril()
        visible[len(known) :] = True
        for step in range(num_steps, 0, -1):
            temperature = options["t_min"] + (options["t_max"] - options["t_min"]) * step / num_steps
            scores = compute(model, [*known, *canvas], [*range(total)], visible)[len(known) :]
            scores = (scores / temperature).log_softmax(-1)
            num_forwards += 1
            entropies = -(scores.exp() * scores).sum(-1)
            sample = torch.multinomial(scores.exp(), 1, generator=generator)[:, 0].tolist()
            samples.append(sample)
            drafts.append(scores.argmax(-1).tolist())
            ranked = entropies.sort(stable=True)
            sums_before = ranked.values.cumsum(0) - ranked.values  # of the lower entropies
            kept = ranked.indices[sums_before <= options["entropy_bound"]].tolist()
            fresh = draw_noise()
            canvas = [sample[i] if i in kept else fresh[i] for i in range(size)]
            is_stable = len(drafts) > num_repeats and all(draft == drafts[-1] for draft in drafts[-num_repeats - 1 :])
            if is_stable and float(entropies.mean()) < options["confidence_threshold"]:
                break
        text += drafts[-1]
    return cut(text[:length], ENDS), num_forwards, Draws(iter(noise), iter(samples))


@settings(max_examples=examples(120), deadline=None)
@given(
    model=MODELS, prompts=TEXTS, length=st.integers(1, 18), seed=st.integers(0, 999),
    options=st.fixed_dictionaries({
        "canvas_length": st.integers(1, 8), "num_steps": st.integers(1, 6), "t_min": st.sampled_from([0.1, 0.4]),
        "t_max": st.sampled_from([0.4, 0.8, 2.0]), "entropy_bound": st.sampled_from([0.0, 0.1, 1.0, 5.0]),
        "stability_threshold": st.integers(0, 2), "confidence_threshold": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    }),
)  # fmt: skip
@torch.no_grad()
def test_canvases(model: Backbone, prompts: list[Text], length: int, seed: int, options: dict[str, Any]) -> None:
    """The slow program draws; the decoder replays the draws."""
    expected = []
    for i, tokens in enumerate(prompts):
        generator = torch.Generator().manual_seed(seed + i)
        text, num_forwards, draws = denoise(model, tokens, length, options, generator)
        DRAWS[str(i)] = draws
        expected.append((text, num_forwards))
    rows = decode_batch(model, Replayed(**options), prompts, length)
    assert [(row.token_ids, row.num_forwards) for row in rows] == expected
