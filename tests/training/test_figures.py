"""Progress of a training run: micro-batches of a step share its counts, and the clock stops during validation."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import pytest
import torch

from refusion_lit.learning.batch import CorruptedBatch, LossOutput, ResponseBatch
from refusion_lit.learning.step import OptimizerStep, group_into_steps
from refusion_lit.objectives import Hybrid
from refusion_lit.training import figures as training
from refusion_lit.training.figures import TrainingFigures
from refusion_lit.training.validation import Validation

LOSS = LossOutput(sums=torch.tensor([6.0, 1.0]), counts=torch.tensor([9.0, 9.0]), terms={"ar": 1.0, "mdm": 0.5})


def _make_corrupted(key: int = 0) -> CorruptedBatch:
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


def _one_step(training_figures: TrainingFigures) -> None:
    step = OptimizerStep([_clean("a", "b")])
    step.begin([_make_corrupted()])
    training_figures.begin_step(step)
    training_figures.add(replace(LOSS, counts=step.take(0).counts))


def _clean(*ids: str) -> ResponseBatch:
    ones = torch.ones(len(ids), dtype=torch.long)
    return ResponseBatch(
        input_ids=ones[:, None],
        prompt_lengths=torch.zeros_like(ones),
        response_lengths=ones,
        sample_keys=ones,
        ids=[*ids],
    )


def test_the_clock_of_the_steps_stands_still_in_a_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    training_figures = TrainingFigures()
    training_figures.num_positions += 40  # of a run that is resumed
    training_figures.start(torch.device("cpu"))
    _one_step(training_figures)
    figures = training_figures.compute()
    assert "positions_per_second" not in figures  # nothing to measure from yet
    assert float(figures["num_positions"]) == 40 + 2 * 5
    assert float(figures["padding"]) == pytest.approx(2 / 10)
    assert (float(figures["ar"]), float(figures["mdm"])) == (6 / 3, 1 / 2)
    assert float(figures["loss"]) == pytest.approx(2 + 0.5 * 0.5)
    now += 2
    validation = Validation(Hybrid(), training_figures)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    validation.on_validation_start(trainer, L.LightningModule())
    now += 1000
    validation.on_validation_end(trainer, L.LightningModule())
    _one_step(training_figures)
    now += 3
    _one_step(training_figures)
    assert float(training_figures.compute()["positions_per_second"]) == pytest.approx(2 * 10 / (2 + 3))


def test_each_micro_batch_of_a_step_has_the_counts_of_the_step() -> None:
    training_figures = TrainingFigures()
    step = OptimizerStep([_clean("a"), _clean("b"), _clean("c")])
    step.begin([_make_corrupted(1), _make_corrupted(2), _make_corrupted(3)])
    training_figures.begin_step(step)
    for number in (1, 2, 3):
        corrupted = step.take(number - 1)
        assert corrupted.input_ids.unique().tolist() == [number]
        assert corrupted.counts.tolist() == [9.0, 6.0]
        assert float(training_figures.num_positions) == 30.0
        training_figures.add(replace(LOSS, counts=corrupted.counts))
    assert training_figures.sample_ids == ["a", "b", "c"]
    figures = training_figures.compute()
    assert (float(figures["ar"]), float(figures["mdm"])) == (18 / 9, 3 / 6)


def test_steps_are_cut_where_the_loader_says() -> None:
    lengths = iter((2, 2, 1, 5))
    batches = [_clean(name) for name in "abcdef"]
    micro_batches = list(group_into_steps(iter(batches), lambda: next(lengths, 1)))
    assert [batch.batch.ids for batch in micro_batches] == [[name] for name in "abcdef"]
    assert [batch.step.sample_ids for batch in micro_batches] == [[*"ab"]] * 2 + [[*"cd"]] * 2 + [["e"], ["f"]]
    assert [batch.is_last for batch in micro_batches] == [False, True, False, True, True, True]
