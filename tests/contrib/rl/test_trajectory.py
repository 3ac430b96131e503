"""The trajectory record: what it says about every decoder's text, how it is read back, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_lit.contrib.rl import Trajectory, TrajectoryRecorder, TrajectoryWriter, read_trajectories
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion, decode
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import hash_models, prompts, setups
from support.effort import examples
from support.fakes import HashModel
from support.subclasses import concrete_subclasses

PROMPTS = [Prompt(token_ids=(3, 4, 5), id="a"), Prompt(token_ids=(6, 3), id="b"), Prompt(token_ids=(4,), id="c")]


def recorded(decoder: Decoder, model: HashModel, sampling: SamplingParams, *, trace: bool = False) -> list[Trajectory]:
    recorder = TrajectoryRecorder(decoder)
    decode(model, decoder, PROMPTS, sampling, batch_size=2, callbacks=[recorder], trace=trace)
    return [recorder.trajectories[index] for index in range(len(PROMPTS))]


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in fields(Trajectory):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other, err_msg=field.name)
        else:
            assert one == other, field.name


@pytest.mark.parametrize("cls", concrete_subclasses(Decoder))
@settings(max_examples=examples(4), deadline=None)
@given(data=st.data())
def test_every_decoders_record_agrees_with_its_text(cls: type[Decoder], data: st.DataObject) -> None:
    decoder, sampling = data.draw(setups(cls))
    model = data.draw(hash_models(flavours=("plain",)))(decoder)
    found = data.draw(prompts(max_size=3))
    recorder = TrajectoryRecorder(decoder)
    output = decode(model, decoder, found, sampling, batch_size=2, callbacks=[recorder])
    for index, (prompt, row) in enumerate(zip(found, output.rows, strict=True)):
        trajectory = recorder.trajectories[index]
        assert trajectory.tokens[: trajectory.num_tokens].tolist() == row.token_ids
        assert tuple(trajectory.prompt_ids) == prompt.token_ids
        assert trajectory.num_forwards == row.num_forwards
        final = trajectory.order >= 0
        assert sorted(trajectory.order[final]) == list(range(final.sum()))
        assert ((trajectory.rounds > 0) == final).all()
        assert ((trajectory.tokens >= 0) == final).all()
        assert final[: len(row.token_ids)].all()
        in_order = trajectory.rounds[np.argsort(np.where(final, trajectory.order, 10**6), kind="stable")][: final.sum()]
        assert (np.diff(in_order) >= 0).all(), "rounds never fall in the order in which tokens became final"


def test_a_next_token_model_commits_one_token_a_round() -> None:
    model = HashModel(traits=ModelTraits(predictions=("next_token",)), ends=frozenset())
    for trajectory in recorded(Autoregressive(), model, SamplingParams(max_new_tokens=7)):
        assert trajectory.rounds[: trajectory.num_tokens].tolist() == list(range(1, trajectory.num_tokens + 1))
        assert trajectory.order[: trajectory.num_tokens].tolist() == list(range(trajectory.num_tokens))
        assert trajectory.slot_size is None


def test_draws_are_recorded_with_a_trace() -> None:
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, slot_threshold=0.1)
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0)
    plain, traced = (recorded(decoder, HashModel(), sampling, trace=trace) for trace in (False, True))
    for one, other in zip(plain, traced, strict=True):
        assert len(one.draws) == 0
        assert len(one.phases) == 0
        assert len(other.phases) == other.num_forwards
        assert other.phases[0] == "plan"
        first = other.draws[other.draws[:, 0] == 1]
        assert set(first[:, 1] // 4) == {0, 1, 2}, "the first plan drafts every slot"
        np.testing.assert_array_equal(one.rounds, other.rounds)


def test_it_is_read_back_memory_mapped_and_extended(tmp_path: Path) -> None:
    decoder = ReFusion(slot_size=4, num_serial_blocks=1)
    written = recorded(decoder, HashModel(), SamplingParams(max_new_tokens=11, temperature=0.9), trace=True)
    writer = TrajectoryWriter(tmp_path)
    writer.write(written[:1])
    writer.write(written[1:])
    found = read_trajectories(tmp_path)
    assert len(found) == 3
    assert found[0].decoder["class"] == "ReFusion"
    assert found[0].slot_size == 4
    for one, other in zip(written, found, strict=True):
        assert_same(one, other)
    if sys.platform == "linux":
        assert str(tmp_path) in Path("/proc/self/maps").read_text(), "the files are mapped, not read"
    with pytest.raises(ValueError, match="read-only"):
        found[0].tokens[0] = 0
    assert [each.id for each in found[1:]] == ["b", "c"]


def test_an_interrupted_record_is_continued_or_written_anew(tmp_path: Path) -> None:
    decoder = ReFusion(slot_size=4, num_serial_blocks=1)
    written = recorded(decoder, HashModel(), SamplingParams(max_new_tokens=11))
    TrajectoryWriter(tmp_path).write(written[:2])
    TrajectoryWriter(tmp_path, resume=True).write(written[1:])  # the second one's prediction had not been written
    for one, other in zip(written, read_trajectories(tmp_path), strict=True):
        assert_same(one, other)
    TrajectoryWriter(tmp_path).write(written[:1])
    assert [each.id for each in read_trajectories(tmp_path)] == ["a"], "a run that is not resumed overwrites"


def test_processes_write_files_of_their_own(tmp_path: Path) -> None:
    written = recorded(ReFusion(slot_size=4, num_serial_blocks=1), HashModel(), SamplingParams(max_new_tokens=11))
    for rank in (1, 0):
        TrajectoryWriter(tmp_path, rank=rank).write(written[rank::2])
    assert [each.id for each in read_trajectories(tmp_path)] == ["a", "c", "b"]


@pytest.mark.parametrize("damage", ["version", "field", "cut", "nothing"])
def test_other_records_are_refused(tmp_path: Path, damage: str) -> None:
    written = recorded(ReFusion(slot_size=4, num_serial_blocks=1), HashModel(), SamplingParams(max_new_tokens=11))
    TrajectoryWriter(tmp_path).write(written)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    if damage == "version":
        file.write_bytes(content.replace(b'"version":"2"', b'"version":"1"'))
    elif damage == "field":
        file.write_bytes(content.replace(b"finish_reason", b"finish_season"))
    elif damage == "cut":
        file.write_bytes(content[:-4])
    else:
        file.unlink()
    with pytest.raises(ValueError, match="trajectories: expected"):
        read_trajectories(tmp_path)
