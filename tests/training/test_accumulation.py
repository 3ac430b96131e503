"""Gradients accumulated over batches and processes are those of one batch that holds all samples of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor

from refusion_lit import SlotDiffusionModule
from refusion_lit.contrib import GroupPolicy
from refusion_lit.data.batches import TrainingLoader, collate_responses
from refusion_lit.data.examples import EncodedExample
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.modeling.block_drafter import BlockDrafterOptions
from refusion_lit.modeling.drafter import DrafterOptions
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.noise import KeyedNoise, stable_key
from refusion_lit.objectives import Autoregressive, BlockDraft, BlockMasked, DualStream, GatedDraft, Hybrid, Objective
from refusion_lit.tasks import Additions
from refusion_lit.types import SamplingParams
from support.subclasses import concrete_subclasses
from support.tiny import TINY_QWEN

LEARNING_RATE = 0.5
# Prompts of 1 to 4 tokens and responses of 2 to 29 tokens.
SAMPLES = [
    EncodedExample(f"sample {i}", [3 + i % 5] * (1 + i % 4), [3 + (i * j) % 11 for j in range(1, 3 + 3 * i % 29)])
    for i in range(12)
]


class FixedBatches(InstructionDataModule):
    """Batches of the samples in order, dealt out over ranks."""

    def __init__(self, batch_size: int, rows: list[int] | None = None) -> None:
        super().__init__(Additions(num_train=1, num_validation=1, num_test=1), CharacterTokenizer(), batch_size)
        self.rows = rows

    def train_dataloader(self) -> TrainingLoader:
        own_samples = SAMPLES[self.trainer.global_rank :: self.trainer.world_size]
        rows = None if self.rows is None else torch.tensor(self.rows)
        batches = [
            replace(collate_responses(own_samples[i : i + self.batch_size], pad_token_id=0), rows=rows)
            for i in range(0, len(own_samples), self.batch_size)
        ]
        loader = TrainingLoader(batches, batch_size=None)
        loader.trainer = self.trainer
        return loader


class Recorded(SlotDiffusionModule):
    """Writes its weights at the end: other processes share no memory."""

    path: Path

    def on_train_end(self) -> None:
        torch.save(
            {name: p.detach() for name, p in self.model.named_parameters()}, f"{self.path}.{self.trainer.global_rank}"
        )


def _module(objective: Objective, path: Path) -> Recorded:
    backbone = BackboneConfig(
        config=TINY_QWEN,
        drafter=DrafterOptions() if isinstance(objective, GatedDraft) else None,
        block_drafter=BlockDrafterOptions(block_size=3, num_layers=1) if isinstance(objective, BlockDraft) else None,
    )
    module = Recorded(
        backbone,
        CharacterTokenizer().build(Additions(num_train=1, num_validation=1, num_test=1)),
        objective,
        optimizer=lambda groups: torch.optim.SGD([{**g, "weight_decay": 0.0} for g in groups], lr=LEARNING_RATE),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        sampling=SamplingParams(max_new_tokens=8),
    )
    module.path = path
    return module


def _fit(
    folder: Path, objective: Objective, *, batch_size: int, rows: list[int] | None = None, **options: object
) -> dict[str, Tensor]:
    module = _module(objective, folder / "weights")
    callbacks = [*options.pop("callbacks", ()), ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", max_epochs=1, logger=False, limit_val_batches=0, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, FixedBatches(batch_size, rows))
    return {**torch.load(folder / "weights.0"), "loss": trainer.callback_metrics.get("train/loss")}


def _by_hand(
    folder: Path, objective: Objective, steps: Sequence[Sequence[EncodedExample]], losses: list[Tensor] | None = None
) -> dict[str, Tensor]:
    """Train with one batch a step by plain gradient descent; append the losses of the steps."""
    module = _module(objective, folder)
    with DoublePrecision().module_init_context():
        module.configure_model()  # random weights of a drafter depend on the default type
    model = module.model.double()
    for samples in steps:
        batch = collate_responses(samples, pad_token_id=0)
        noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
        corrupted = objective.corrupt(batch, noise, model.special_tokens)
        hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible, num_drafts=corrupted.num_drafts)
        loss = objective.loss(hidden, model.logits, corrupted).total
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
        if losses is not None:
            losses.append(loss.detach())
    return {name: p.detach() for name, p in model.named_parameters()}


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-7, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


OBJECTIVES: list[Objective] = [
    Hybrid(slot_sizes=(2, 4)),
    Hybrid(mdm_weight=0.3),
    BlockMasked(block_size=4),
    DualStream(block_size=4),
    # Roll-outs of GroupPolicy need a task: tests/contrib/rl.
    *(cls() for cls in concrete_subclasses(Objective) if cls is not GroupPolicy),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_micro_batches_and_packed_rows_are_one_batch_and_the_last_step_may_be_short(
    tmp_path: Path, objective: Objective
) -> None:
    losses: list[Tensor] = []
    expected = _by_hand(tmp_path, objective, [SAMPLES[:8], SAMPLES[8:]], losses)
    actual = _fit(tmp_path, objective, batch_size=2, accumulate_grad_batches=4, log_every_n_steps=1)
    _assert_equal(actual, {**expected, "loss": losses[-1]})
    if objective.packs:
        (tmp_path / "packed").mkdir()
        packed = _fit(tmp_path / "packed", objective, batch_size=4, rows=[0, 1, 0, 1], accumulate_grad_batches=2)
        _assert_equal(packed, expected)


def test_a_mean_of_means_would_be_seen(tmp_path: Path) -> None:
    """The tolerance tells the right loss from the usual mistake."""
    objective = Autoregressive()
    right = _by_hand(tmp_path, objective, [SAMPLES[:4]])
    start = _by_hand(tmp_path, objective, [])
    halves = [_by_hand(tmp_path, objective, [SAMPLES[i : i + 2]]) for i in (0, 2)]
    wrong = {name: (halves[0][name] + halves[1][name]) / 2 for name in start}
    with pytest.raises(AssertionError):
        _assert_equal(wrong, right)


def test_an_epoch_cut_short_and_a_changing_number_of_batches(tmp_path: Path) -> None:
    objective = Hybrid(slot_sizes=(2, 4))
    (tmp_path / "cut").mkdir()
    actual = _fit(tmp_path / "cut", objective, batch_size=2, accumulate_grad_batches=4, limit_train_batches=3)
    _assert_equal(actual, _by_hand(tmp_path, objective, [SAMPLES[:6]]))
    schedule = GradientAccumulationScheduler({0: 3})
    (tmp_path / "schedule").mkdir()
    actual = _fit(tmp_path / "schedule", objective, batch_size=2, callbacks=[schedule])
    _assert_equal(actual, _by_hand(tmp_path, objective, [SAMPLES[:6], SAMPLES[6:]]))


def test_each_micro_batch_is_corrupted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []
    corrupt = Hybrid.corrupt

    def count_samples(self: Hybrid, batch: ResponseBatch, *args: object, **options: object) -> CorruptedBatch:
        keys.extend(batch.sample_keys.tolist())
        return corrupt(self, batch, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Hybrid, "corrupt", count_samples)
    _fit(tmp_path, Hybrid(slot_sizes=(4,)), batch_size=2, accumulate_grad_batches=4)
    assert keys == [stable_key(sample.id) for sample in SAMPLES]


@pytest.mark.parametrize(("objective", "accumulated"), [(Hybrid(slot_sizes=(2, 4)), 2), *((o, 1) for o in OBJECTIVES)],
                         ids=lambda value: type(value).__name__)  # fmt: skip
def test_two_processes_are_one(tmp_path: Path, objective: Objective, accumulated: int) -> None:
    actual = _fit(
        tmp_path, objective, batch_size=2, accumulate_grad_batches=accumulated, devices=2, strategy="ddp_fork"
    )
    step_size = 2 * accumulated * 2  # batches of two samples in two processes
    steps = [SAMPLES[i : i + step_size] for i in range(0, len(SAMPLES), step_size)]
    _assert_equal(actual, _by_hand(tmp_path, objective, steps))
    _assert_equal(actual, torch.load(tmp_path / "weights.1"))


def test_resuming_between_steps_changes_nothing(tmp_path: Path) -> None:
    def fit(folder: str, checkpoint: Path | None = None) -> dict[str, Tensor]:
        task = Additions(num_train=25, num_validation=1, num_test=1)
        data = InstructionDataModule(task, CharacterTokenizer(), batch_size=4)
        module = _module(Hybrid(slot_sizes=(4,)), tmp_path / folder)
        callback = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=2, accumulate_grad_batches=4, logger=False, limit_val_batches=0,
            callbacks=[callback], enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=checkpoint)
        assert trainer.global_step == 4  # two steps an epoch, of four batches and of the last two
        return torch.load(f"{tmp_path / folder}.0")

    unbroken = fit("unbroken")
    for step in (1, 2, 3):
        resumed = fit(f"resumed {step}", tmp_path / "unbroken" / f"step={step}.ckpt")
        assert all(torch.equal(value, resumed[name]) for name, value in unbroken.items())


def test_what_is_logged_is_the_mean_of_the_step(tmp_path: Path) -> None:
    """A step logs the losses of a single batch with all samples of the step, computed with the weights before it."""
    objective = Hybrid(slot_sizes=(2, 4))
    logged: list[dict[str, float]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            if (trainer.fit_loop.total_batch_idx + 1) % 3 == 0:
                logged.append({name: float(trainer.logged_metrics[name]) for name in ("train/ar", "train/mdm")})

    _fit(tmp_path, objective, batch_size=2, accumulate_grad_batches=3, callbacks=[Watch()], log_every_n_steps=1)
    module = _module(objective, tmp_path)
    module.configure_model()
    model = module.model.double()
    steps = [SAMPLES[:6], SAMPLES[6:]]
    for number, samples in enumerate(steps):
        weights = _by_hand(tmp_path, objective, steps[:number])  # the weights before this step
        model.load_state_dict(weights, strict=False)
        batch = collate_responses(samples, pad_token_id=0)
        corrupted = module.objective.corrupt(
            batch, KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0), model.special_tokens
        )
        expected = objective.loss(model(corrupted.input_ids, corrupted.position_ids), model.logits, corrupted)
        for name, mean in expected.named_means().items():
            assert logged[number][f"train/{name}"] == pytest.approx(float(mean), rel=1e-6)


def test_a_loader_that_does_not_look_ahead_is_refused(tmp_path: Path) -> None:
    module = _module(Hybrid(), tmp_path / "weights")
    loader = torch.utils.data.DataLoader([collate_responses(SAMPLES[:2], pad_token_id=0)] * 4, batch_size=None)
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "limit_val_batches": 0}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    L.Trainer(**options).fit(module, loader, loader)
    with pytest.raises(ValueError, match="accumulate_grad_batches: expected 1"):
        L.Trainer(**options, accumulate_grad_batches=2).fit(module, loader, loader)
