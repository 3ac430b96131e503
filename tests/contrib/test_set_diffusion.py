"""Set diffusion against a slow loop without a cache, and against its training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib import SetDiffusion, StaggeredSets
from refusion_lit.contrib import set_diffusion as staggered_sets
from refusion_lit.decoding import decode
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import traits_for
from support.example_counts import examples
from support.fakes import MASK, SPECIAL, HashModel, tiny_backbone
from support.loop_cases import LoopCase, loop_cases
from support.slow_decoding import best_allowed, cut


def slow_sets(
    model: LanguageModel, prompt: tuple[int, ...], decoder: SetDiffusion, length: int
) -> tuple[list[int], int]:
    """Decode with a forward for each mask: the clean tokens in the order of their decoding, and that mask."""
    known, num_forwards = dict(enumerate(prompt)), 0
    special, start = model.special_tokens, len(prompt)
    while True:
        first = next(p for p in range(start, start + length + 1) if p not in known)
        drafts = {}
        for p in range(first, min(first + decoder.window_size, start + length)):
            if p in known:
                continue
            row, places = [*known.values(), MASK], [*known, p]
            causal = torch.ones(1, len(row), len(row), dtype=torch.bool).tril()
            logits = model.logits(model.hidden_states(torch.tensor([row]), torch.tensor([places]), causal)[0, -1:])
            logits = logits[0].double()
            token = best_allowed(logits, special.banned_token_ids, special.vocab_size)
            drafts[p] = (float(logits.softmax(-1)[token]), token)
        num_forwards += 1
        best = sorted(drafts, key=lambda p: (-drafts[p][0], p))[: decoder.quota]
        for p in sorted(drafts):
            if p in best or (decoder.threshold is not None and drafts[p][0] >= decoder.threshold):
                known[p] = drafts[p][1]
        text = [known[p] for p in range(start, start + length) if all(q in known for q in range(start, p + 1))]
        if set(special.eos_token_ids) & set(text) or len(text) == length:
            return cut(text, special.eos_token_ids), num_forwards


@settings(max_examples=examples(48), deadline=None)
@given(
    case=loop_cases(),
    window_size=st.integers(1, 7),
    threshold=st.sampled_from([None, 0.0, 0.05, 0.1, 0.3, 1.0]),
    quota=st.integers(1, 3),
)
def test_the_text_is_that_of_a_loop_without_cache(
    case: LoopCase, window_size: int, threshold: float | None, quota: int
) -> None:
    decoder = SetDiffusion(window_size=window_size, threshold=threshold, quota=quota)
    case.check(decoder, slow_sets)


def test_training_gives_the_probabilities_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward of the objective, in the order in which the decoder committed, predicts what the decoder read."""
    prompt, length = [3, 4, 5], 14
    objective = StaggeredSets()
    model = tiny_backbone(objective.traits)
    batch, sampling = [Prompt(token_ids=tuple(prompt), id="p")], SamplingParams(max_new_tokens=length)
    [row] = decode(model, SetDiffusion(window_size=5, threshold=None), batch, sampling, trace=True).rows
    order = [entry.accepted[0] for entry in row.trace]
    assert order != sorted(order)
    clean = ResponseBatch(
        input_ids=torch.tensor([[*prompt, *row.token_ids]]), prompt_lengths=torch.tensor([3]),
        response_lengths=torch.tensor([row.num_tokens]), sample_keys=torch.tensor([1]),
    )  # fmt: skip
    times = torch.zeros(1, 3 + row.num_tokens, dtype=torch.float64)
    times[0, order] = -torch.arange(row.num_tokens).double()
    monkeypatch.setattr(staggered_sets, "staggered_times", lambda *_: times)
    noise = KeyedNoise.for_samples(clean.sample_keys, seed=0, epoch=0)
    corrupted = objective.corrupt(clean, noise, SPECIAL)
    with torch.no_grad():
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)[0, 3 + row.num_tokens :]
        trained = model.logits(hidden).softmax(-1)
    for i, entry in enumerate(row.trace):
        index = entry.positions.index(order[i])
        assert entry.probabilities[index] == pytest.approx(float(trained[i, entry.tokens[index]]), abs=1e-10)


def test_a_window_of_one_mask_is_left_to_right_and_computes_each_token_once_beside_its_mask() -> None:
    decoder = SetDiffusion(window_size=1)
    model = HashModel(0, ends=frozenset(), end_bias=-99.0, traits=traits_for(decoder))
    row = decode(model, decoder, [Prompt(token_ids=(5, 6, 7), id="0")], SamplingParams(max_new_tokens=6)).rows[0]
    assert (row.num_forwards, row.num_positions) == (6, 3 + 5 + 6)


@pytest.mark.parametrize("options", [{"window_size": 0}, {"threshold": 1.5}, {"threshold": -0.1}, {"quota": 0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SetDiffusion(**options)  # type: ignore[arg-type]


def test_a_model_whose_masks_see_one_another_is_refused() -> None:
    reasons = SetDiffusion().requirements().mismatches(tiny_backbone().traits)
    assert any("isolated_mask" in reason for reason in reasons)
