"""What an objective of one's own returns is checked: losses flatten tensors, and would take wrong targets silently."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from refusion_lit.data.batches import collate_responses
from refusion_lit.data.examples import EncodedExample
from refusion_lit.learning.batch import CorruptedBatch
from refusion_lit.learning.objective import Objective, corrupt_and_check
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import Autoregressive, Masked
from support.fakes import SPECIAL

SAMPLES = [EncodedExample("a", (5, 6), (7, 8, 1)), EncodedExample("b", (5,), (9, 1))]


@dataclass(frozen=True, kw_only=True)
class Slipping(Autoregressive):
    """Returns what ``change`` makes of the right batch."""

    change: Callable[[CorruptedBatch], Any] = lambda corrupted: corrupted

    def corrupt(self, *args: Any, **options: Any) -> Any:
        return self.change(super().corrupt(*args, **options))


def set_attributes(corrupted: CorruptedBatch, **changes: Any) -> CorruptedBatch:
    """Set attributes, which the suite's check of shapes does not see."""
    for name, value in changes.items():
        setattr(corrupted, name, value)
    return corrupted


def corrupt(objective: Objective) -> CorruptedBatch:
    batch = collate_responses(SAMPLES, pad_token_id=0)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    return corrupt_and_check(objective, batch, noise, SPECIAL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, r"Slipping.corrupt: expected a CorruptedBatch, got None; return one"),
        (
            lambda x: set_attributes(x, labels=x.labels[:, 1:]),
            r"corrupt: labels: expected the shape of input_ids, \(2, 5\), got",
        ),
        (lambda x: set_attributes(x, weights=x.weights[0]), r"corrupt: weights: expected the shape of input_ids"),
        (
            lambda x: set_attributes(x, input_ids=x.input_ids[:1]),
            r"corrupt: input_ids: expected 2 rows, one per view and sam",
        ),
        (lambda x: set_attributes(x, num_views=2), r"corrupt: input_ids: expected 4 rows"),
        (
            lambda x: set_attributes(x, counts=torch.ones(2)),
            r"corrupt: counts: expected one per term, \(1,\), got \(2,\)",
        ),
    ],
)
def test_tensors_of_other_shapes_are_refused(change: Callable[[CorruptedBatch], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(Slipping(change=change))


def test_attention_that_is_not_causal_is_stated() -> None:
    """Left out, the model would be trained with causal attention."""
    whole = Masked.corrupt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Masked, "corrupt", lambda *args, **options: set_attributes(whole(*args, **options), visible=None))
        message = "corrupt: visible: expected the ranges of bidirectional attention, got None"
        with pytest.raises(ValueError, match=message):
            corrupt(Masked())
    assert corrupt(Masked()).visible is not None


def test_what_fits_is_what_the_objective_returns() -> None:
    assert corrupt(Slipping()).labels.equal(corrupt(Autoregressive()).labels)


def test_an_objective_that_does_not_say_what_it_trains_is_refused() -> None:
    class Silent(Autoregressive):
        trained = None

    message = "objective: expected what Silent trains, got None; add trained = ModelTraits"
    with pytest.raises(ValueError, match=re.escape(message)):
        _ = Silent().traits
