"""The dependency curve against models whose dependencies are known, and against a plain loop."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import ModelTraits, SpecialTokens
from support.fakes import PlainModel, tiny_backbone

PROGRAM = Path(__file__).parents[2] / "experiments" / "dependency_study" / "dependency.py"
MASK, VOCAB = 2, 6

dependency_curve = runpy.run_path(str(PROGRAM))["dependency_curve"]


class Neighbours(PlainModel):
    """Predicts token 3 or 4: each known token at one of the given distances adds 1 to the logit of token 3."""

    def __init__(self, distances: tuple[int, ...], attention: Any, *, shifted: bool = False) -> None:
        self.distances, self.shifted = distances, shifted
        self.traits = ModelTraits(attention=attention, predictions=("mask_shifted" if shifted else "mask",))
        self.special_tokens = SpecialTokens(mask_token_id=MASK, eos_token_ids=(1,), pad_token_id=0, vocab_size=VOCAB)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_cache(self, num_rows: int) -> KVCache:
        return KVCache(0, num_rows)  # no layers: it keeps no state

    def logits(self, hidden: Tensor) -> Tensor:
        scores = torch.full((*hidden.shape[:-1], VOCAB), -30.0, dtype=torch.float64)
        scores[..., 3], scores[..., 4] = hidden[..., 0], 0.0
        return scores

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, cache: Any = None
    ) -> Tensor:
        assert attention_mask is not None
        relative = position_ids[:, None, :] - (position_ids + int(self.shifted))[:, :, None]
        known = (input_ids != MASK)[:, None, :] & attention_mask
        near = torch.stack([relative == d for d in self.distances]).any(0)
        return (near & known).sum(-1, keepdim=True).double()


def bernoulli_kl(after: float, before: float) -> float:
    p, q = 1 / (1 + math.exp(-after)), 1 / (1 + math.exp(-before))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(
    ("attention", "distances", "shifted"),
    [("bidirectional", (-1, 3), False), ("bidirectional", (-1, 3), True), ("causal", (-2, 1), False)],
)
def test_only_tokens_at_the_given_distances_change_the_prediction(
    attention: Any, distances: tuple[int, ...], shifted: bool
) -> None:
    model = Neighbours(distances, attention, shifted=shifted)
    samples = [([5, 5, 5], [3, 4, 3, 4, 3, 4, 3, 4])] * 12
    curve = dependency_curve(model, samples, max_distance=5, mask_ratio=1.0, num_targets=3)
    assert curve.distances == [d for d in range(-5, 6) if d]
    # With every response token masked, a revealed neighbour raises the logit of token 3 from 0 to 1; for targets close
    # to the prompt, whose tokens are known, from 1 to 2.
    for distance, kl, variation in zip(curve.distances, curve.kl, curve.total_variation, strict=True):
        if distance in distances:
            assert bernoulli_kl(2, 1) - 1e-9 <= kl <= bernoulli_kl(1, 0) + 1e-9
            assert 0.1 < variation < 0.24
        else:
            assert kl == pytest.approx(0, abs=1e-12)
            assert variation == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("attention", ["causal", "bidirectional", "block_causal"])
def test_the_batch_size_does_not_change_the_curve(attention: Any) -> None:
    model = tiny_backbone()
    block = 4 if attention == "block_causal" else None
    model.traits = ModelTraits(attention=attention, block_size=block, predictions=("mask",))
    samples = [([5, 6], [7, 8, 9, 10, 11]), ([4], [6, 5, 8])]
    alone = dependency_curve(model, samples, max_distance=3, num_targets=2, batch_size=1)
    together = dependency_curve(model, samples, max_distance=3, num_targets=2, batch_size=64)
    assert alone.num_pairs == together.num_pairs
    assert sum(alone.num_pairs) > 0
    assert alone.kl == pytest.approx(together.kl, rel=1e-9)
    assert alone.total_variation == pytest.approx(together.total_variation, rel=1e-9)
    assert max(alone.kl) > 0


def test_another_seed_gives_other_masks() -> None:
    model = tiny_backbone()
    samples = [([5, 6], [7, 8, 9, 10, 11, 12, 13, 7])] * 4
    curves = [dependency_curve(model, samples, seed=seed) for seed in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]


def test_a_model_without_mask_prediction_is_refused() -> None:
    model = tiny_backbone()
    model.traits = ModelTraits(predictions=("next_token",))
    with pytest.raises(ValueError, match="expected a model that predicts masks, got 'next_token'"):
        dependency_curve(model, [([5], [6, 7])])


@pytest.mark.parametrize("options", [{"max_distance": 0}, {"num_targets": 0}, {"batch_size": 0}, {"mask_ratio": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        dependency_curve(tiny_backbone(), [([5], [6, 7])], **options)
