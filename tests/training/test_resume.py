"""A training that stops any number of times, in any hook that saves checkpoints, equals one that does not stop."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor

from refusion_lit import SlotDiffusionModule
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.objectives import Masked
from refusion_lit.tasks import Additions
from refusion_lit.training.optimizer import WarmupCosine
from refusion_lit.types import SamplingParams
from support.tiny import TINY_QWEN

SHORT = SamplingParams(max_new_tokens=4)
AFTER_BATCH, AFTER_VALIDATION, AFTER_EPOCH = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"
HOOKS = (AFTER_BATCH, AFTER_VALIDATION, AFTER_EPOCH)


class StoppedError(Exception):
    """Ends a training as a kill after the last checkpoint would."""


class StopAt(L.Callback):
    """Saves a checkpoint in a hook after an optimizer step, and ends the training there."""

    def __init__(self, step: int, hook: str, path: Path) -> None:
        self._step = step
        self._path = path
        setattr(self, hook, self._stop)

    def _stop(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)
            raise StoppedError


class Recorded(SlotDiffusionModule):
    """Records the step, the epoch and the samples of every corrupted batch."""

    batches: list[tuple[int, int, list[str]]]

    def corrupt(self, batch: ResponseBatch) -> CorruptedBatch:
        self.batches.append((self.global_step, self.current_epoch, batch.ids))
        return super().corrupt(batch)


@dataclass(frozen=True)
class Training:
    """Options of a training with two samples a batch."""

    num_batches: int
    num_accumulated: int = 1
    limits: dict[str, int] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    schedule: dict[int, int] | None = None
    precision: str = "32-true"

    def run(self, stops: Sequence[tuple[int, str]] = ()) -> tuple[dict[str, Tensor], list[Any], tuple[int, int]]:
        """Train with stops; return the weights, the recorded batches, and the final step and epoch."""
        batches: list[Any] = []
        path: Path | None = None
        with tempfile.TemporaryDirectory() as folder:
            # No step has the number -1: the last part goes to the end.
            for number, stop in enumerate([*stops, (-1, AFTER_BATCH)]):
                saved = Path(folder) / f"{number}.ckpt"
                task = Additions(num_train=2 * self.num_batches, num_validation=1, num_test=1)
                data = InstructionDataModule(task, CharacterTokenizer(), 2)
                backbone = BackboneConfig(config={**TINY_QWEN, "attention_dropout": 0.1})
                schedule = WarmupCosine(warmup_steps=2)
                module = Recorded(backbone, data.built_tokenizer, Masked(), schedule=schedule, sampling=SHORT)
                module.batches = batches
                callbacks: list[L.Callback] = [StopAt(*stop, saved)]
                if self.schedule is not None:
                    callbacks.append(GradientAccumulationScheduler(self.schedule))
                precision: Any = self.precision
                trainer = L.Trainer(
                    accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                    enable_checkpointing=False, callbacks=callbacks, num_sanity_val_steps=0, precision=precision,
                    accumulate_grad_batches=self.num_accumulated, **self.limits, **self.validation,
                )  # fmt: skip
                try:
                    trainer.fit(module, data, ckpt_path=path)
                except StoppedError:
                    path = saved
                else:
                    break
        return module.model.state_dict(), batches, (trainer.global_step, trainer.current_epoch)

    def check(self, stops: Sequence[tuple[int, str]]) -> None:
        """Compare a training with stops with one without."""
        expected, actual = self.run(), self.run(stops)
        assert actual[1:] == expected[1:]
        assert all(torch.equal(actual[0][name], value) for name, value in expected[0].items())


TRAININGS = st.builds(
    Training,
    num_batches=st.integers(2, 4),
    num_accumulated=st.integers(1, 3),
    limits=st.sampled_from([{"max_epochs": 3}, {"max_epochs": 4, "max_steps": 7}, {"max_steps": 6}]),
    validation=st.sampled_from(
        [
            {"check_val_every_n_epoch": 1},
            {"check_val_every_n_epoch": 2},
            {"check_val_every_n_epoch": None, "val_check_interval": 2},
        ]
    ),
)
STOPS = st.lists(st.tuples(st.integers(1, 11), st.sampled_from(HOOKS)), max_size=4, unique_by=lambda stop: stop[0])


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@example(Training(3, limits={"max_epochs": 4}), [(3, AFTER_BATCH), (6, AFTER_BATCH), (9, AFTER_BATCH)])
@example(Training(3, limits={"max_epochs": 4}), [(3, AFTER_EPOCH), (6, AFTER_EPOCH), (8, AFTER_BATCH)])
@example(Training(4, 3, limits={"max_epochs": 4}), [(2, AFTER_VALIDATION), (3, AFTER_BATCH), (6, AFTER_VALIDATION)])
@example(Training(4, limits={"max_epochs": 3}, schedule={0: 1, 1: 2, 2: 3}), [(5, AFTER_BATCH), (7, AFTER_BATCH)])
@example(Training(3, limits={"max_epochs": 2}, precision="64-true"), [(2, AFTER_BATCH), (3, AFTER_EPOCH)])
@given(TRAININGS, STOPS)
def test_stops_change_nothing(training: Training, stops: list[tuple[int, str]]) -> None:
    training.check(sorted(stops))


def test_a_resumed_training_has_the_patience_of_its_options(tmp_path: Path) -> None:
    checkpoint: Path | None = None
    for patience in (3, 7):
        data = InstructionDataModule(Additions(num_train=4, num_validation=2, num_test=1), CharacterTokenizer(), 2)
        module = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), data.built_tokenizer, Masked(), sampling=SHORT)
        stopping = EarlyStopping("val/loss", patience=patience)
        trainer = L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[stopping], enable_checkpointing=False, num_sanity_val_steps=0, max_steps=patience,
            log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=checkpoint)
        assert stopping.patience == patience
        checkpoint = tmp_path / "last.ckpt"
        trainer.save_checkpoint(checkpoint)


def _fit(folder: Path, num_steps: int, *callbacks: L.Callback, resume: Path | None = None, **options: Any) -> L.Trainer:
    """Train on epochs of three batches; return the trainer, also if a callback has stopped it."""
    data = InstructionDataModule(Additions(num_train=6, num_validation=2, num_test=1), CharacterTokenizer(), 2)
    module = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), data.built_tokenizer, Masked(), sampling=SHORT)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=num_steps,
        callbacks=[*callbacks], num_sanity_val_steps=0, default_root_dir=folder, **options,
    )  # fmt: skip
    with suppress(StoppedError):
        trainer.fit(module, data, ckpt_path=resume)
    return trainer


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_python_users_hold_the_validation_of_their_step(tmp_path: Path) -> None:
    options: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": 2}

    def callbacks(name: str) -> list[L.Callback]:
        saving = ModelCheckpoint(tmp_path / name, save_last=True, every_n_train_steps=2)
        return [saving, EarlyStopping("val/loss", mode="max", patience=3, min_delta=100.0)]

    unbroken = _fit(tmp_path, 20, *callbacks("unbroken"), **options)
    stopped = StopAt(5, AFTER_BATCH, tmp_path / "unused.ckpt")
    _fit(tmp_path, 20, *callbacks("resumed"), stopped, **options)
    resumed = _fit(tmp_path, 20, *callbacks("resumed"), resume=tmp_path / "resumed" / "last.ckpt", **options)
    assert unbroken.global_step == resumed.global_step == 8  # the first validation and three that are not better
    first, second = (_load(tmp_path / name / "last.ckpt")["state_dict"] for name in ("unbroken", "resumed"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interval", [1.0, 3])
def test_the_best_checkpoint_of_an_interval_that_ends_with_the_epoch_is_of_its_step(
    tmp_path: Path, interval: float
) -> None:
    best = ModelCheckpoint(tmp_path, "{step}", monitor="val/loss", every_n_train_steps=3, save_top_k=-1)
    trainer = _fit(tmp_path, 9, best, val_check_interval=interval)
    assert sorted(_load(path)["global_step"] for path in tmp_path.glob("*.ckpt")) == [3, 6, 9]
    assert trainer.checkpoint_callbacks == [best]  # a test without a path warns of more


@pytest.mark.filterwarnings("ignore")
def test_a_last_checkpoint_inside_an_epoch_goes_on_there_and_replaces_no_other_training_s(tmp_path: Path) -> None:
    for num_steps in (4, 5):
        _fit(tmp_path, num_steps, ModelCheckpoint(tmp_path, save_last=True))
    states = [_load(path) for path in (tmp_path / "last.ckpt", tmp_path / "last-v1.ckpt")]
    assert [state["global_step"] for state in states] == [4, 5]
    assert states[1]["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 2


def test_a_subclass_of_a_callback_without_resuming_is_refused(tmp_path: Path) -> None:
    class Averaging(StochasticWeightAveraging):
        pass

    with pytest.raises(ValueError, match=r"trainer\.callbacks: .*Averaging"):
        _fit(tmp_path, 1, Averaging(swa_lrs=0.1))
