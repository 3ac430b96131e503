"""WeDLM against its description as a plain loop that recomputes the whole text in every forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import ModelMismatchError, WeDLM, decode
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import prompts
from support.example_counts import examples
from support.fakes import EOS, MASK, PAD, SPECIAL, VOCAB, HashModel, tiny_backbone, tiny_qwen
from support.slow_decoding import best_allowed

MASKS = ModelTraits(predictions=("mask", "next_token"))
NO_END = replace(SPECIAL, eos_token_ids=(VOCAB + 2,))


@torch.no_grad()
def logits_of(tokens: list[int], positions: list[int]) -> Tensor:
    """Run tokens causally in the given order, without a cache."""
    sees = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).tril()
    ids, places = torch.tensor([tokens]), torch.tensor([positions])
    return tiny_qwen()(ids, attention_mask=sees, position_ids=places, use_cache=False).logits[0]


@dataclass
class Reference:
    """The released engine's loop, from its description: refill, reorder, forward, commit, fill."""

    decoder: WeDLM
    prompt: tuple[int, ...]
    max_new_tokens: int
    ends: tuple[int, ...]
    text: list[int] = field(default_factory=list)
    filled: list[list[int]] = field(default_factory=list)
    num_tokens_fed: list[int] = field(default_factory=list)

    def run(self) -> list[int]:
        text = list(self.prompt)
        window: list[int | None] = [None] * self.decoder.window_size
        while True:
            num_leading = next((k for k, token in enumerate(window) if token is None), len(window))
            window += [None] * num_leading
            order = [k for k, token in enumerate(window) if token is not None]
            masks = [k for k, token in enumerate(window) if token is None]
            fed = [token for token in window if token is not None] + [MASK] * len(masks)
            positions = [len(text) + k for k in (*order, *masks)]
            logits = logits_of([*text, *fed], [*range(len(text)), *positions])[len(text) + len(order) :]
            start = len(text)
            for token in window[:num_leading]:
                assert token is not None
                text.append(token)
                if token in self.ends or len(text) == len(self.prompt) + self.max_new_tokens:
                    return text[len(self.prompt) :]
            self.fill(window, masks, logits, start)
            window = window[num_leading:]

    def fill(self, window: list[int | None], masks: list[int], logits: Tensor, start: int) -> None:
        if not masks:
            return  # a whole window without masks, cached by a forward of its own
        adjusted = []
        for k, row in zip(masks, logits, strict=True):
            probability = row.softmax(-1)
            entropy = -float((probability * probability.log()).nan_to_num().sum())
            adjusted.append(entropy + self.decoder.position_penalty * (k - masks[0]))
        threshold = self.decoder.entropy_threshold
        chosen = [i for i, value in enumerate(adjusted) if threshold is not None and value < threshold]
        chosen = chosen or [adjusted.index(min(adjusted))]
        for i in chosen:
            window[masks[i]] = best_allowed(logits[i], (PAD, MASK), VOCAB)
        self.filled.append([start + masks[i] for i in chosen])


@settings(max_examples=examples(54), deadline=None)
@given(
    window_size=st.integers(1, 7),
    threshold=st.sampled_from([None, 0.0, 0.2, 0.6, 1.2, 9.0]),
    penalty=st.sampled_from([0.0, 0.02, 0.3]),
    found=prompts(max_size=1),
    length=st.integers(1, 18),
    ends=st.sampled_from([(EOS,), (VOCAB + 2,), (EOS, 5, 9)]),
)
def test_greedy_decoding_is_the_slow_reference(
    window_size: int,
    threshold: float | None,
    penalty: float,
    found: list[Prompt],
    length: int,
    ends: tuple[int, ...],
) -> None:
    decoder = WeDLM(window_size=window_size, entropy_threshold=threshold, position_penalty=penalty)
    reference = Reference(decoder, found[0].token_ids, length, ends)
    text = reference.run()
    model = tiny_backbone(MASKS, replace(SPECIAL, eos_token_ids=ends))
    [row] = decode(model, decoder, found, SamplingParams(max_new_tokens=length), trace=True).rows
    assert row.token_ids == text
    assert [entry.accepted for entry in row.trace] == reference.filled[: len(row.trace)]
    # The loop makes one more forward, which caches the end; what it fills is not part of the text.
    assert len(reference.filled) - row.num_forwards in (0, 1)


def test_the_end_is_noticed_when_it_is_filled() -> None:
    decoder, prompt = WeDLM(window_size=4, entropy_threshold=9.0, position_penalty=0.0), Prompt(token_ids=(3,), id="p")
    [row] = decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=10)).rows
    # Each forward fills the four masks; from the second one on it also feeds the four tokens before them.
    assert row.forward_shapes == [(1, 5), (1, 8), (1, 8)]


@settings(max_examples=examples(24), deadline=None)
@given(seed=st.integers(0, 99), found=prompts(max_size=1), lengths=st.tuples(st.integers(1, 9), st.integers(10, 25)))
def test_a_longer_limit_only_adds_tokens(seed: int, found: list[Prompt], lengths: tuple[int, int]) -> None:
    short, long = (
        decode(HashModel(seed, traits=MASKS), WeDLM(window_size=5), found, SamplingParams(max_new_tokens=n)).rows[0]
        for n in lengths
    )
    assert long.token_ids[: short.num_tokens] == short.token_ids


def test_a_window_of_one_asks_a_mask_for_each_token_in_turn() -> None:
    text = [3, 4, 5]
    for _ in range(12):
        logits = logits_of([*text, MASK], list(range(len(text) + 1)))[-1]
        text.append(best_allowed(logits, (PAD, MASK), VOCAB))
    prompt, decoder = Prompt(token_ids=(3, 4, 5), id="p"), WeDLM(window_size=1)
    [row] = decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=12)).rows
    assert row.token_ids == text[3:]
    assert row.num_forwards == 12


@pytest.mark.parametrize("threshold", [None, -1.0])
def test_without_a_threshold_each_forward_fills_one_token(threshold: float | None) -> None:
    prompt, decoder = Prompt(token_ids=(3, 4, 5), id="p"), WeDLM(window_size=6, entropy_threshold=threshold)
    model = tiny_backbone(MASKS, NO_END)
    [row] = decode(model, decoder, [prompt], SamplingParams(max_new_tokens=20), trace=True).rows
    assert {len(entry.accepted) for entry in row.trace} == {1}
    assert [entry.accepted for entry in row.trace] != sorted(entry.accepted for entry in row.trace), "not left to right"


def test_entropy_is_that_of_the_unfiltered_distribution_at_any_temperature() -> None:
    """Filters that leave one token would make every mask certain."""
    prompt, decoder = Prompt(token_ids=(3, 4, 5), id="p"), WeDLM(window_size=6, entropy_threshold=0.5)
    plain, filtered = (
        decode(tiny_backbone(MASKS, NO_END), decoder, [prompt], SamplingParams(max_new_tokens=20, **options)).rows[0]
        for options in ({}, {"temperature": 3.0, "top_k": 1})
    )
    assert filtered.token_ids == plain.token_ids
    assert filtered.forward_shapes == plain.forward_shapes


@pytest.mark.parametrize("options", [{"window_size": 0}, {"position_penalty": -0.1}])
def test_impossible_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        WeDLM(**options)


def test_models_without_mask_predictions_are_refused() -> None:
    model = tiny_backbone(ModelTraits(predictions=("next_token",)))
    with pytest.raises(ModelMismatchError, match="needs the predictions mask"):
        decode(model, WeDLM(), [Prompt(token_ids=(3,), id="p")], SamplingParams())
