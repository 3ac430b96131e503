"""The speed of a training: positions over the time of steps, the clock stopped in a validation."""

from __future__ import annotations

import pytest
import torch

from refusion_lit.objectives.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.training import progress as training
from refusion_lit.training.accumulation import StepLoss
from refusion_lit.training.progress import TrainingProgress

LOSS = LossOutput(
    sums=torch.tensor([6.0, 1.0]), counts=torch.tensor([9.0, 9.0]), coefficients=(1.0, 0.5), names=("ar", "mdm")
)


def _batch(following: tuple[ResponseBatch, ...] | None) -> tuple[ResponseBatch, CorruptedBatch]:
    ids = torch.zeros(2, 5, dtype=torch.long)
    corrupted = CorruptedBatch(
        input_ids=ids,
        position_ids=ids,
        labels=ids,
        weights=torch.ones(2, 5),
        terms=ids,
        term_names=LOSS.names,
        counts=torch.tensor([3.0, 2.0]),
        coefficients=LOSS.coefficients,
        is_real=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=ids[:, 0], response_lengths=ids[:, 0], sample_keys=ids[:, 0], following=following
    )
    return batch, corrupted


def _step(progress: TrainingProgress) -> StepLoss:
    batch, corrupted = _batch(())
    step = progress.step_of(batch, corrupted, lambda _: corrupted, num_accumulated=1)
    step.share(LOSS)
    return step


def test_the_clock_of_the_steps_stands_still_in_a_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    progress = TrainingProgress(40)
    progress.start(torch.device("cpu"), 1)
    figures = progress.figures(_step(progress), LOSS)
    assert "positions_per_second" not in figures  # nothing to measure from yet
    assert float(figures["num_positions"]) == 50
    assert float(figures["padding"]) == pytest.approx(0.2)
    assert (float(figures["ar"]), float(figures["mdm"])) == (2.0, 0.5)
    assert float(figures["loss"]) == pytest.approx(2.25)
    now += 2
    progress.pause()
    now += 1000
    progress.go_on()
    _step(progress)
    now += 3
    assert float(progress.figures(_step(progress), LOSS)["positions_per_second"]) == pytest.approx(20 / 5)


def test_batches_of_a_step_share_what_its_first_one_counted() -> None:
    progress = TrainingProgress()
    batch, corrupted = _batch(None)
    first, _ = _batch((batch, batch))
    step = progress.step_of(first, corrupted, lambda _: corrupted, num_accumulated=3)
    assert (float(progress.num_positions), step.counts.tolist(), step.num_left) == (30.0, [9.0, 6.0], 3)
    step.share(LOSS)
    assert progress.step_of(batch, corrupted, lambda _: corrupted, num_accumulated=3) is step
    assert float(progress.num_positions) == 30.0
    with pytest.raises(ValueError, match="accumulate_grad_batches: expected 1 with a loader that does not look ahead"):
        TrainingProgress().step_of(batch, corrupted, lambda _: corrupted, num_accumulated=3)
