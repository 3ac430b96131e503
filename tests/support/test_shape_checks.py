"""Shapes and types are checked while tests run, in functions and in dataclasses, and only in the first calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from refusion_lit.data.batches import collate_responses
from refusion_lit.data.examples import EncodedExample
from refusion_lit.learning.text_order import text_then_masks
from support.shape_checks import NUM_CHECKED


def test_a_wrong_shape_is_found() -> None:
    right, wrong = torch.zeros(2, 3, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    text_then_masks(4, right, right)
    with pytest.raises(BeartypeCallHintViolation):
        text_then_masks(4, wrong, right)
    batch = collate_responses([EncodedExample("a", (5, 6), (7, 8, 1))], pad_token_id=0)
    with pytest.raises(BeartypeCallHintViolation):
        replace(batch, input_ids=batch.input_ids[0])


def test_the_first_calls_are_checked() -> None:
    right, numbers = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
    for _ in range(NUM_CHECKED - 1):
        text_then_masks(4, right, right)
    with pytest.raises(BeartypeCallHintViolation):
        text_then_masks(4, numbers, right)
    text_then_masks(4, numbers, right)  # not checked any more


def test_a_name_of_a_dimension_stands_for_one_size_in_a_call() -> None:
    right = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(BeartypeCallHintViolation):
        text_then_masks(4, right, torch.zeros(2, 4, dtype=torch.long))
    text_then_masks(4, right[:, :2], right[:, :2])  # other sizes in another call
