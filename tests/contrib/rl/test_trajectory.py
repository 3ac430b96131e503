"""Trajectories agree with the text of every decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib.rl import Trajectory, TrajectoryRecorder
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion, decode
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import hash_models, prompts, setups
from support.example_counts import examples
from support.fakes import HashModel
from support.subclasses import concrete_subclasses

PROMPTS = [Prompt(token_ids=(3, 4, 5), id="a"), Prompt(token_ids=(6, 3), id="b"), Prompt(token_ids=(4,), id="c")]


def record(decoder: Decoder, model: HashModel, sampling: SamplingParams, *, trace: bool = False) -> list[Trajectory]:
    recorder = TrajectoryRecorder(decoder)
    decode(model, decoder, PROMPTS, sampling, batch_size=2, callbacks=[recorder], trace=trace)
    return [recorder.trajectories[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("cls", concrete_subclasses(Decoder))
@settings(max_examples=examples(4), deadline=None)
@given(data=st.data())
def test_every_decoders_record_agrees_with_its_text(cls: type[Decoder], data: st.DataObject) -> None:
    decoder, sampling = data.draw(setups(cls))
    model = data.draw(hash_models(flavours=("plain",)))(decoder)
    batch = data.draw(prompts(max_size=3))
    recorder = TrajectoryRecorder(decoder)
    output = decode(model, decoder, batch, sampling, batch_size=2, callbacks=[recorder])
    for index, (prompt, row) in enumerate(zip(batch, output.rows, strict=True)):
        trajectory = recorder.trajectories[index]
        assert trajectory.tokens[: trajectory.num_tokens].tolist() == row.token_ids
        assert tuple(trajectory.prompt_ids) == prompt.token_ids
        assert trajectory.num_forwards == row.num_forwards
        final = trajectory.order >= 0
        assert sorted(trajectory.order[final]) == list(range(final.sum()))
        assert ((trajectory.rounds > 0) == final).all()
        assert ((trajectory.tokens >= 0) == final).all()
        assert final[: len(row.token_ids)].all()
        rounds = trajectory.rounds[final][np.argsort(trajectory.order[final])]
        assert (np.diff(rounds) >= 0).all(), "rounds never fall in the order in which tokens became final"


def test_a_next_token_model_commits_one_token_a_round() -> None:
    model = HashModel(traits=ModelTraits(predictions=("next_token",)), ends=frozenset())
    for trajectory in record(Autoregressive(), model, SamplingParams(max_new_tokens=7)):
        assert trajectory.rounds[: trajectory.num_tokens].tolist() == list(range(1, trajectory.num_tokens + 1))
        assert trajectory.order[: trajectory.num_tokens].tolist() == list(range(trajectory.num_tokens))
        assert trajectory.slot_size is None


def test_draws_are_recorded_with_a_trace() -> None:
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, slot_threshold=0.1)
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0)
    plain, traced = (record(decoder, HashModel(), sampling, trace=trace) for trace in (False, True))
    for without, with_draws in zip(plain, traced, strict=True):
        assert len(without.draws) == 0
        assert len(without.phases) == 0
        assert len(with_draws.phases) == with_draws.num_forwards
        assert with_draws.phases[0] == "plan"
        first = with_draws.draws[with_draws.draws[:, 0] == 1]
        assert set(first[:, 1] // 4) == {0, 1, 2}, "the first plan drafts every slot"
        np.testing.assert_array_equal(without.rounds, with_draws.rounds)
