"""Progress of a training run: micro-batches of a step share its counts, and the clock stops during validation."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import pytest
import torch

from refusion_lit.learning.batch import CorruptedBatch, LossOutput
from refusion_lit.objectives import Hybrid
from refusion_lit.training import progress as training
from refusion_lit.training.progress import TrainingProgress
from refusion_lit.training.validation import Validation

LOSS = LossOutput(sums=torch.tensor([6.0, 1.0]), counts=torch.tensor([9.0, 9.0]), terms={"ar": 1.0, "mdm": 0.5})


def _corrupted(key: int = 0) -> CorruptedBatch:
    ids = torch.full((2, 5), key)
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
    progress.begin_step([_corrupted()], ["a", "b"])
    progress.add(replace(LOSS, counts=progress.next_micro_batch().counts))


def test_the_clock_of_the_steps_stands_still_in_a_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    progress = TrainingProgress()
    progress.num_positions += 40  # of a run that is resumed
    progress.start(torch.device("cpu"))
    _one_step(progress)
    figures = progress.figures()
    assert "positions_per_second" not in figures  # nothing to measure from yet
    assert float(figures["num_positions"]) == 50
    assert float(figures["padding"]) == pytest.approx(0.2)
    assert (float(figures["ar"]), float(figures["mdm"])) == (2.0, 0.5)
    assert float(figures["loss"]) == pytest.approx(2.25)
    now += 2
    validation = Validation(Hybrid(), progress)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    validation.on_validation_start(trainer, L.LightningModule())
    now += 1000
    validation.on_validation_end(trainer, L.LightningModule())
    _one_step(progress)
    now += 3
    _one_step(progress)
    assert float(progress.figures()["positions_per_second"]) == pytest.approx(20 / 5)


def test_each_micro_batch_of_a_step_has_the_counts_of_the_step() -> None:
    progress = TrainingProgress()
    progress.begin_step([_corrupted(1), _corrupted(2), _corrupted(3)], ["a", "b", "c"])
    for number in (1, 2, 3):
        corrupted = progress.next_micro_batch()
        assert corrupted.input_ids.unique().tolist() == [number]
        assert corrupted.counts.tolist() == [9.0, 6.0]
        assert float(progress.num_positions) == 30.0
        progress.add(replace(LOSS, counts=corrupted.counts))
    figures = progress.figures()
    assert (float(figures["ar"]), float(figures["mdm"])) == (18 / 9, 3 / 6)


def test_an_interrupted_step_is_not_continued_by_the_next_one() -> None:
    progress = TrainingProgress()
    progress.begin_step([_corrupted(1), _corrupted(2)], ["a", "b"])
    progress.next_micro_batch()
    progress.begin_step([_corrupted(3)], ["c"])
    assert progress.next_micro_batch().input_ids.unique().tolist() == [3]
    assert progress.sample_ids == ["c"]
