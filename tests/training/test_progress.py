"""Progress of a training run: micro-batches of a step share its counts, and the clock stops during validation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.training import progress as training
from refusion_lit.training.progress import TrainingProgress

LOSS = LossOutput(sums=torch.tensor([6.0, 1.0]), counts=torch.tensor([9.0, 9.0]), terms={"ar": 1.0, "mdm": 0.5})


def _batch(key: int = 0, following: tuple[ResponseBatch, ...] | None = None) -> ResponseBatch:
    ids = torch.full((2, 5), key)
    return ResponseBatch(
        input_ids=ids, prompt_lengths=ids[:, 0], response_lengths=ids[:, 0], sample_keys=ids[:, 0], following=following
    )


def _corrupt(batch: ResponseBatch) -> CorruptedBatch:
    ids = batch.input_ids
    return CorruptedBatch(
        input_ids=ids,
        position_ids=ids,
        labels=ids,
        weights=torch.ones(2, 5),
        terms=ids,
        counts=torch.tensor([3.0, 2.0]),
        is_real=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )


def _one_step(progress: TrainingProgress) -> None:
    corrupted = progress.micro_batch(_batch(following=()), _corrupt, num_accumulated=1)
    assert progress.add(replace(LOSS, counts=corrupted.counts))


def test_the_clock_of_the_steps_stands_still_in_a_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    progress = TrainingProgress(40)
    progress.start(torch.device("cpu"), 1)
    _one_step(progress)
    figures = progress.figures()
    assert "positions_per_second" not in figures  # nothing to measure from yet
    assert float(figures["num_positions"]) == 50
    assert float(figures["padding"]) == pytest.approx(0.2)
    assert (float(figures["ar"]), float(figures["mdm"])) == (2.0, 0.5)
    assert float(figures["loss"]) == pytest.approx(2.25)
    now += 2
    progress.pause()
    now += 1000
    progress.resume()
    _one_step(progress)
    now += 3
    _one_step(progress)
    assert float(progress.figures()["positions_per_second"]) == pytest.approx(20 / 5)


def test_each_micro_batch_of_a_step_is_corrupted_once_and_has_the_counts_of_the_step() -> None:
    seen: list[int] = []

    def corrupt(batch: ResponseBatch) -> CorruptedBatch:
        seen.append(int(batch.sample_keys[0]))
        return _corrupt(batch)

    progress = TrainingProgress()
    second, third = _batch(2), _batch(3)
    for number, batch in enumerate((_batch(1, (second, third)), second, third), start=1):
        corrupted = progress.micro_batch(batch, corrupt, num_accumulated=3)
        assert seen == [1, 2, 3]
        assert corrupted.input_ids.unique().tolist() == [number]
        assert corrupted.counts.tolist() == [9.0, 6.0]
        assert float(progress.num_positions) == 30.0
        assert progress.add(replace(LOSS, counts=corrupted.counts)) == (number == 3)
    figures = progress.figures()
    assert (float(figures["ar"]), float(figures["mdm"])) == (18 / 9, 3 / 6)
    progress.micro_batch(_batch(4, ()), corrupt, num_accumulated=3)  # the short last step of an epoch
    assert seen == [1, 2, 3, 4]


def test_a_step_without_its_other_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="accumulate_grad_batches: expected 1 with a loader that does not look ahead"):
        TrainingProgress().micro_batch(_batch(), _corrupt, num_accumulated=3)
    TrainingProgress().micro_batch(_batch(), _corrupt, num_accumulated=1)


def test_an_interrupted_step_is_not_continued_by_the_next_training() -> None:
    progress = TrainingProgress()
    progress.micro_batch(_batch(1, (_batch(2),)), _corrupt, num_accumulated=2)
    progress.start(torch.device("cpu"), 1)
    corrupted = progress.micro_batch(_batch(3), _corrupt, num_accumulated=1)
    assert corrupted.input_ids.unique().tolist() == [3]
