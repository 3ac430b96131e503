"""APD against a slow loop without a cache, with one model and with two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.contrib import APD
from refusion_lit.contrib.apd import PairedModel
from refusion_lit.decoding import Autoregressive, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import traits_for
from support.example_counts import examples
from support.fakes import MASK, HashModel, tiny_backbone
from support.loop_cases import LoopCase, loop_cases
from support.slow_decoding import best_allowed, cut

CAUSAL = ModelTraits(predictions=("next_token",))


def compute_logits(model: LanguageModel, row: list[int], *, causal: bool) -> Tensor:
    """Return the logits of a text, without a cache."""
    visible = torch.ones(1, len(row), len(row), dtype=torch.bool)
    if causal:
        visible = visible.tril()
    hidden = model.hidden_states(torch.tensor([row]), torch.arange(len(row))[None], visible)
    return model.logits(hidden[0]).double()


def slow_apd(
    masked: LanguageModel, verifier: LanguageModel, prompt: tuple[int, ...], decoder: APD, length: int
) -> tuple[list[int], int]:
    """Draft with the masked model and verify with the autoregressive model; every forward pass feeds the whole text.

    Returns:
        The response and the number of forward passes.
    """
    text, num_forwards, special = list(prompt), 0, masked.special_tokens
    weight = decoder.mixture_weight

    def best(logits: Tensor) -> int:
        return best_allowed(logits, special.banned_token_ids, special.vocab_size)

    while True:
        num_drafts = min(decoder.max_lookahead or length, len(prompt) + length - len(text))
        known = len(text)
        logits = compute_logits(masked, [*text, *[MASK] * num_drafts], causal=False)
        drafted = logits[known - decoder.shifted :][:num_drafts]
        drafts = [best(row) for row in drafted]
        num_forwards += 1
        text.append(drafts[0])
        if num_drafts > 1:
            num_forwards += 1
            verified = compute_logits(verifier, [*prompt, *text[len(prompt) : -1], *drafts], causal=True)
            for j in range(1, num_drafts):
                draft_logits, target_logits = drafted[j], verified[known + j - 1]
                if best(draft_logits + (1 - weight) * (target_logits - draft_logits)) != drafts[j]:
                    break
                text.append(drafts[j])
        response = text[len(prompt) :]
        if set(special.eos_token_ids) & set(response) or len(response) == length:
            return cut(response, special.eos_token_ids), num_forwards


@settings(max_examples=examples(48), deadline=None)
@given(
    case=loop_cases(),
    weight=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    lookahead=st.none() | st.integers(1, 9),
    shifted=st.booleans(),
)
def test_text_and_forward_passes_equal_a_loop_without_a_cache(
    case: LoopCase, weight: float, lookahead: int | None, shifted: bool
) -> None:
    decoder = APD(mixture_weight=weight, max_lookahead=lookahead, shifted=shifted)
    case.check(decoder, lambda model, prompt, options, length: slow_apd(model, model, prompt, options, length))


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.9, 1.0])
def test_two_transformers_write_what_the_loop_writes(weight: float) -> None:
    decoder = APD(mixture_weight=weight, max_lookahead=6)
    masked = tiny_backbone(ModelTraits(attention="bidirectional", predictions=("mask",)))
    verifier = tiny_backbone(CAUSAL)
    with torch.no_grad():
        for parameter in verifier.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).double())
    batch = [Prompt(token_ids=tuple(range(3, 3 + n)), id=str(n)) for n in (1, 5, 8)]
    rows = decode(PairedModel(masked, verifier), decoder, batch, SamplingParams(max_new_tokens=20), batch_size=2)
    with torch.no_grad():
        expected = [slow_apd(masked, verifier, prompt.token_ids, decoder, 20) for prompt in batch]
    assert [(row.token_ids, row.num_forwards) for row in rows.rows] == expected


def test_weight_1_accepts_every_draft_and_one_mask_needs_no_verifier() -> None:
    decoder = APD(mixture_weight=1.0, max_lookahead=4)
    model = HashModel(0, ends=frozenset(), end_bias=-99.0, traits=traits_for(decoder))
    prompt, sampling = Prompt(token_ids=(5, 6, 7), id="0"), SamplingParams(max_new_tokens=9)
    row = decode(model, decoder, [prompt], sampling).rows[0]
    # Windows of 4, 4 and 1 masks. The verifier computes each token but the last two once.
    assert row.forward_shapes == [(1, 7), (1, 6), (1, 11), (1, 4), (1, 12)]


def test_with_weight_0_sampling_repeats_and_accepts_some_drafts() -> None:
    """Drafts and the verifier's draws share their noise, so that equal distributions often draw the same token."""
    decoder = APD(mixture_weight=0.0)
    model = HashModel(3, ends=frozenset(), end_bias=-99.0, traits=traits_for(decoder))
    prompt, sampling = Prompt(token_ids=(5, 6, 7), id="0"), SamplingParams(max_new_tokens=30, temperature=1.0)
    rows = [decode(model, decoder, [prompt], sampling).rows[0] for _ in range(2)]
    assert rows[0].token_ids == rows[1].token_ids
    assert 2 * 1 < rows[0].num_forwards < 2 * 30, "between one round and a round for every token"


def test_the_fused_bodies_of_both_models_are_made_once_per_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = tiny_backbone(ModelTraits(attention="bidirectional", predictions=("mask",)))
    verifier = tiny_backbone(CAUSAL)
    pair = PairedModel(masked, verifier)
    owners: list[Backbone] = []
    make = Backbone.make_fused_body

    def record(self: Backbone) -> Any:
        owners.append(self)
        return make(self)

    monkeypatch.setattr(Backbone, "make_fused_body", record)
    batch = [Prompt(token_ids=(3, 4, 5), id="a")]
    decoder = APD(mixture_weight=0.5)
    (row,) = decode(pair, decoder, batch, SamplingParams(max_new_tokens=8)).rows
    assert row.num_forwards > 2
    assert owners == [masked, verifier]


def test_models_that_do_not_go_together_are_refused() -> None:
    masked = tiny_backbone(ModelTraits(attention="bidirectional", predictions=("mask",)))
    with pytest.raises(ValueError, match="verifier"):
        PairedModel(masked, masked)
    with pytest.raises(ValueError, match="verifier"):
        decode(masked, APD(), [Prompt(token_ids=(3,), id="p")], SamplingParams(max_new_tokens=3))
    with pytest.raises(ValueError, match="predictions mask"):
        decode(PairedModel(tiny_backbone(CAUSAL), tiny_backbone(CAUSAL)), APD(), [], SamplingParams(max_new_tokens=3))
    assert decode(tiny_backbone(CAUSAL), Autoregressive(), [], SamplingParams()).rows == []


@pytest.mark.parametrize("options", [{"mixture_weight": 1.5}, {"mixture_weight": -0.1}, {"max_lookahead": 0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        APD(**options)  # type: ignore[arg-type]
