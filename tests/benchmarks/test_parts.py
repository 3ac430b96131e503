"""Benchmarks time what they say: a training step counts its tokens, body and head are both found."""

from __future__ import annotations

import pytest
from benchmarks.common import SMALL, decoded, golden_model, golden_runs, random_model
from benchmarks.host_time import DECODERS, milliseconds_a_call
from benchmarks.overhead import PARTS, timed
from benchmarks.training import OBJECTIVES, batch_of, ragged_batches, step_of

from refusion_lit.decoding import ReFusion
from refusion_lit.types import Prompt


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_training_step_counts_its_tokens(objective: str) -> None:
    outcome = step_of(random_model(SMALL), OBJECTIVES[objective], batch_of(2, 3, 5, 32)).run()
    assert outcome["num_tokens"] == 16
    assert 0 < outcome["num_labels"] <= 20


def test_packed_and_padded_steps_have_the_same_tokens() -> None:
    backbone = random_model(SMALL)
    padded, packed = (step_of(backbone, OBJECTIVES["hybrid"], batch).run() for batch in ragged_batches(32))
    assert padded["num_tokens"] == packed["num_tokens"]


def test_body_and_head_are_timed() -> None:
    model = golden_model("clean")
    seconds = timed(model)
    prompt = Prompt(token_ids=tuple(golden_runs("clean")["runs"][0]["prompt"]), id="0")
    decoded(model, ReFusion(slot_size=4), [prompt], 16)
    assert all(seconds[part] > 0 for part in PARTS)


@pytest.mark.parametrize("name", DECODERS)
def test_host_time_is_counted_between_calls(name: str) -> None:
    found = milliseconds_a_call(DECODERS[name], 64, 1, 32)
    assert found["milliseconds"] > 0
    # From left to right a call per token, of which the first two are left out; by the schedule several tokens per call.
    assert found["num_calls"] in ((30,) if name == "autoregressive" else range(1, 16))
