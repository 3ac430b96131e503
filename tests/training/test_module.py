"""The LightningModule: what it optimises, how it schedules, and that its losses depend on seed and samples alone."""

from __future__ import annotations

import csv
import math
import re
import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from refusion_lit import SlotDiffusionModule
from refusion_lit.contrib import R2FT, SoftTail
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.decoding import ReFusion
from refusion_lit.evaluation.loop import EvaluationOptions
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.objectives import Autoregressive, BlockMasked, Hybrid, Masked, Objective
from refusion_lit.tasks import Additions
from refusion_lit.training.optimizer import (
    WarmupCosine,
    apply_optimizer_options,
    make_optimizer,
    make_scheduler,
    parameter_groups,
    read_optimizer_options,
    rehearse,
)
from refusion_lit.types import SamplingParams
from refusion_lit.utils.files import acquire_lock, release_lock
from support.tiny import TINY_QWEN


def _make_module(**options: object) -> tuple[SlotDiffusionModule, InstructionDataModule]:
    """Return a tiny module with the objective ``Hybrid``, and its data; ``options`` are the module's."""
    data = InstructionDataModule(Additions(num_train=64, num_validation=16, num_test=8), CharacterTokenizer(), 8, 8)
    module = SlotDiffusionModule(
        BackboneConfig(config=TINY_QWEN), data.built_tokenizer, Hybrid(slot_sizes=(4,)), **options
    )
    return module, data


def _trainer(directory: Path, **options: object) -> L.Trainer:
    options = {"max_steps": 3, "enable_checkpointing": False, "logger": False} | options
    return L.Trainer(
        default_root_dir=directory, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **options
    )


def test_norms_and_biases_get_no_weight_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model[0].weight.requires_grad_(True)
    decayed, plain = parameter_groups(model)
    assert [p.shape for p in decayed["params"]] == [(3, 3)]
    assert len(plain["params"]) == 3
    assert plain["weight_decay"] == 0.0
    assert "weight_decay" not in decayed
    model[0].requires_grad_(False)
    assert parameter_groups(model)[0]["params"] == []


def test_an_attention_pattern_that_the_objective_replaces_is_refused(tmp_path: Path) -> None:
    module, data = _make_module()
    module.backbone_config = BackboneConfig(config=TINY_QWEN, attention="bidirectional")
    with pytest.raises(ValueError, match=r"^model\.backbone\.attention: expected .*causal, .*Hybrid"):
        _trainer(tmp_path).fit(module, data)
    module.backbone_config = BackboneConfig(config=TINY_QWEN, attention="causal")
    _trainer(tmp_path, max_steps=1).fit(module, data)


def test_base_classes_and_schedules_by_validation_figures_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^model\.optimizer\.class_path: .*'Optimizer'"):
        make_optimizer(model, lambda groups: torch.optim.Optimizer(groups, {"lr": 0.1}))
    optimizer = make_optimizer(model, lambda groups: torch.optim.SGD(groups, lr=0.1))
    for cls in (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        with pytest.raises(ValueError, match=rf"^model\.lr_scheduler\.class_path: .*{cls.__name__}"):
            make_scheduler(optimizer, cls)
    with pytest.raises(ValueError, match=r"^model\.lr_scheduler: .*init_args"):
        make_scheduler(optimizer, lambda made: torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.1))


class _StepsTwice(torch.optim.SGD):
    """Computes the loss twice in a step, which automatic optimization does not allow."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "make_schedule", "option"),
    [
        (torch.optim.SparseAdam, None, "model.optimizer"),
        (torch.optim.LBFGS, None, "model.optimizer"),
        (partial(torch.optim.AdamW, capturable=True), None, "model.optimizer"),
        (partial(torch.optim.AdamW, differentiable=True), None, "model.optimizer"),
        (partial(torch.optim.AdamW, fused=True, foreach=True), None, "model.optimizer"),
        (_StepsTwice, None, "model.optimizer"),
        (torch.optim.SGD, partial(torch.optim.lr_scheduler.StepLR, step_size=0), "model.lr_scheduler"),
        (torch.optim.SGD, partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=0), "model.lr_scheduler"),
        (
            torch.optim.SGD,
            partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
            "model.lr_scheduler",
        ),
    ],
)
def test_optimizers_and_schedules_that_fail_in_a_step_are_refused_before_work_starts(
    make: Any, make_schedule: Any, option: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(option)}: "):
        rehearse(nn.Linear(2, 2), make, make_schedule or partial(WarmupCosine(warmup_steps=0), num_steps=10), 10)


@pytest.mark.parametrize(
    "make", [None, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.ASGD]
)
def test_common_optimizers_are_accepted(make: Any) -> None:
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10, cycle_momentum=False)
    for num_steps in (10, 1, math.inf):
        rehearse(nn.Linear(2, 2), make, schedule, num_steps)


@pytest.mark.parametrize(
    ("make", "option"),
    [(torch.optim.AdamW, "amsgrad"), (torch.optim.RMSprop, "centered"), (torch.optim.RMSprop, "momentum")],
)
def test_resuming_may_turn_an_option_with_averages_off_but_not_on(
    make: type[torch.optim.Optimizer], option: str
) -> None:
    """``amsgrad``, ``centered`` and ``momentum`` need averages of earlier gradients, which the checkpoint lacks."""

    def options(**values: object) -> tuple[torch.optim.Optimizer, LambdaLR, dict[str, Any]]:
        optimizer = make([nn.Parameter(torch.zeros(1))], lr=0.1, **values)
        schedule = LambdaLR(optimizer, lambda _: 1.0)
        return optimizer, schedule, read_optimizer_options(optimizer, schedule)

    optimizer, schedule, before = options()
    with pytest.raises(ValueError, match=rf"^model\.optimizer\.{option}: "):
        apply_optimizer_options(optimizer, schedule, before, options(**{option: 1})[2])
    optimizer, schedule, before = options(**{option: 1})
    apply_optimizer_options(optimizer, schedule, before, options()[2])
    assert not optimizer.param_groups[0][option]


def test_warm_up_then_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    with pytest.warns(UserWarning, match=r"^model\.schedule\.warmup_steps: expected fewer than .* 4"):
        WarmupCosine(warmup_steps=4)(optimizer, num_steps=4)
    schedule = WarmupCosine(warmup_steps=4, final_lr_ratio=0.1)(optimizer, num_steps=24)
    rates = []
    for _ in range(26):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    # Step 14 is half-way between the end of the warm-up at step 4 and the end at step 24.
    assert rates[14] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[24:] == pytest.approx([0.2, 0.2])
    assert all(a >= b for a, b in pairwise(rates[4:]))


@pytest.mark.parametrize("other", ["eos_token", "bos_token", "pad_token", "template"])
def test_a_mask_token_that_means_something_else_is_refused_where_masks_are_trained(other: str, tmp_path: Path) -> None:
    task = Additions(num_train=64, num_validation=16, num_test=8)
    template = "<|mask|>{query}" if other == "template" else "{query}"
    data = InstructionDataModule(task, CharacterTokenizer(), 8, 8, prompt_template=template)
    if other != "template":
        data.built_tokenizer.add_special_tokens({other: "<|mask|>"})
    for objective in (Hybrid(slot_sizes=(4,)), BlockMasked(), SoftTail()):
        module = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), data.built_tokenizer, objective)
        with pytest.raises(
            ValueError, match=r"^data\.tokenizer: expected a mask token of its own, got '<\|mask\|>, which"
        ):
            _trainer(tmp_path).fit(module, data)
    module = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), data.built_tokenizer, Autoregressive())
    _trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, data)


def test_two_runs_with_the_same_seed_are_equal_bit_for_bit(tmp_path: Path) -> None:
    weights = []
    for seed in (0, 0, 1):
        module, data = _make_module(seed=seed)
        torch.manual_seed(torch.randint(1000, ()).item())  # the global generator must not matter
        _trainer(tmp_path).fit(module, data)
        weights.append({name: value.clone() for name, value in module.model.state_dict().items()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][name]) for name, value in weights[0].items())


def test_training_lowers_the_validation_loss_and_validation_is_repeatable(tmp_path: Path) -> None:
    module, data = _make_module(
        schedule=WarmupCosine(warmup_steps=1), optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2)
    )
    trainer = _trainer(tmp_path, max_steps=30)
    (before,) = trainer.validate(module, data, verbose=False)
    (again,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    (after,) = trainer.validate(module, data, verbose=False)
    assert before == again
    assert before["val/loss"] == pytest.approx(before["val/ar"] + before["val/mdm"], rel=1e-5)
    assert after["val/loss"] < before["val/loss"] - 0.3


def test_a_training_without_validation_needs_no_samples_for_it(tmp_path: Path) -> None:
    data = InstructionDataModule(Additions(num_train=64, num_validation=0), CharacterTokenizer(), 8)
    module = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), data.built_tokenizer, Hybrid(slot_sizes=(4,)))
    with pytest.raises(ValueError, match=r"^data\.task: expected examples in the validation split, got 0"):
        _trainer(tmp_path).fit(module, data)
    trainer = _trainer(tmp_path, limit_val_batches=0)
    trainer.fit(module, data)
    assert trainer.global_step == 3


def test_validation_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    losses = []
    for size in (3, 16):
        module, data = _make_module()
        data.eval_batch_size = size
        losses.append(_trainer(tmp_path).validate(module, data, verbose=False)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fit_stores_the_objectives_traits_in_the_model_and_warns_of_decoders_that_do_not_fit(tmp_path: Path) -> None:
    module, data = _make_module(decoders={"refusion": ReFusion()})
    assert module.text_model().backbone.traits.predictions is None
    _trainer(tmp_path, max_steps=1).fit(module, data)
    assert module.model.traits == Hybrid().traits
    module.objective = Autoregressive()
    with pytest.warns(UserWarning, match="model.decoders.refusion: ReFusion does not fit"):
        _trainer(tmp_path, max_steps=1).fit(module, data)
    assert module.model.traits.predictions == ("next_token",)
    with pytest.raises(ValueError, match="ReFusion does not fit this model"):
        _trainer(tmp_path).test(module, data, verbose=False)


@pytest.mark.parametrize(
    ("objective", "canvas", "is_warned"),
    [
        (Masked(), 128, True),
        (Masked(), 24, False),
        (Masked(pad_responses_to=16), 128, True),
        (Masked(pad_responses_to=128), 128, False),
        (R2FT(), 128, True),
        (Hybrid(slot_sizes=(4,)), 128, False),
    ],
)
def test_a_canvas_longer_than_any_that_is_trained_gets_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, objective: Objective, canvas: int, is_warned: bool
) -> None:
    module, data = _make_module(sampling=SamplingParams(max_new_tokens=canvas))
    module.objective = objective
    assert 24 < (data.longest_response() or 0) < 64
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, data)
    assert any("pad_responses_to" in str(warning.message) for warning in recwarn) == is_warned


def test_impossible_decoder_settings_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="num_serial_blocks: expected at most 2"):
        _make_module(decoders={"a": ReFusion(num_serial_blocks=3)}, sampling=SamplingParams(max_new_tokens=16))


@pytest.mark.parametrize("name", ["threshold_0.9", "a/b", ""])
def test_a_decoder_name_that_cannot_be_a_file_is_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="decoders: expected names of letters"):
        _make_module(decoders={name: ReFusion()}, sampling=SamplingParams(max_new_tokens=16))


@pytest.mark.parametrize("objective", [Hybrid(slot_sizes=(4,)), BlockMasked(block_size=4)])
def test_positions_are_counted_over_a_resumed_run(tmp_path: Path, objective: Objective) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def count_steps(num_steps: int, checkpoint: str | None = None) -> tuple[list[float], int]:
        module, data = _make_module()
        module.objective = objective
        computed: list[int] = []
        module.configure_model()
        module.model.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
        logger = CSVLogger(str(tmp_path), name=f"steps-{num_steps}")
        trainer = _trainer(tmp_path, logger=logger, max_steps=num_steps, log_every_n_steps=1, limit_val_batches=0)
        trainer.fit(module, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        logger.save()
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
        assert all(float(row["train/positions_per_second"]) > 0 for row in rows[1:])
        return [float(row["train/num_positions"]) for row in rows], sum(computed)

    first, total = count_steps(2)
    assert first[-1] == total
    then, more = count_steps(5, str(tmp_path / "last.ckpt"))
    assert then[-1] == total + more
    assert then == sorted(then)


EVERY_OBJECTIVE = [Hybrid(slot_sizes=(4,)), Autoregressive(), Masked(cart_p=0.3), BlockMasked(block_size=4)]


@pytest.mark.filterwarnings("ignore:trainer.precision")
@pytest.mark.parametrize("objective", EVERY_OBJECTIVE, ids=lambda objective: type(objective).__name__)
def test_training_in_bf16_is_training_in_float32_but_for_rounding(tmp_path: Path, objective: Objective) -> None:
    class Watch(L.Callback):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []

        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.steps.append({name: value for name, value in metrics.items() if "train/" in name})

    runs = []
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        watch = Watch()
        module, data = _make_module(
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.2),
            schedule=WarmupCosine(warmup_steps=0),
            sampling=SamplingParams(max_new_tokens=16),
        )
        module.objective = objective
        options = {"precision": precision, "max_steps": 4, "log_every_n_steps": 1, "limit_val_batches": 0}
        _trainer(tmp_path, **options, callbacks=[watch]).fit(module, data)
        expected_type = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert {p.dtype for p in module.model.parameters()} == {expected_type}
        runs.append(watch.steps)
    for run in runs[1:]:
        for step, expected in zip(run, runs[0], strict=True):
            assert step["train/loss"] == pytest.approx(expected["train/loss"], rel=0.02)
            # The corruption and all that is counted are not rounded to bf16, which is the default type meanwhile.
            assert step["train/num_positions"] == expected["train/num_positions"]
            assert step["train/padding"] == expected["train/padding"]


def test_gradient_checkpointing_trains_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for checkpointing in (False, True):
        module, data = _make_module()
        module.backbone_config = replace(module.backbone_config, gradient_checkpointing=checkpointing)
        built = module.backbone_config.build(data.built_tokenizer)
        assert built.make_fused_body() is not None, "what roll-outs and tests decode with"
        data.pack_length = 512  # an explicit mask as well
        _trainer(tmp_path, precision="64-true", limit_val_batches=0).fit(module, data)
        weights.append({name: value.clone() for name, value in module.model.state_dict().items()})
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("when", ["on_test_start", "on_test_batch_start"])
def test_a_test_that_is_interrupted_resumes_in_the_same_process(tmp_path: Path, when: str) -> None:
    """The first module still exists, as in a notebook, but its predictions files are free again.

    The first test is interrupted either at its start, because the second decoder's file is in use, or in its second
    batch.
    """

    class Interrupted(L.Callback):
        def on_test_batch_start(
            self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int, *_: object
        ) -> None:
            if batch_idx == 1:
                raise RuntimeError("interrupted")

    data = InstructionDataModule(Additions(num_train=4, num_validation=4, num_test=4), CharacterTokenizer(), 2, 2)

    def make(*, resume: bool) -> SlotDiffusionModule:
        return SlotDiffusionModule(
            BackboneConfig(config=TINY_QWEN), data.built_tokenizer, resume=resume,
            decoders={"a": ReFusion(), "b": ReFusion(slot_size=4)}, sampling=SamplingParams(max_new_tokens=8),
            decoding=EvaluationOptions(allow_mismatch=True),
        )  # fmt: skip

    first = make(resume=False)
    if when == "on_test_start":
        lock = acquire_lock(tmp_path / ".predictions_b.jsonl.lock", "run_version", "other", "wait")
        with pytest.raises(ValueError, match="other"):
            _trainer(tmp_path).test(first, data)
        release_lock(lock)
    else:
        with pytest.raises(RuntimeError, match="interrupted"):
            _trainer(tmp_path, callbacks=[Interrupted()]).test(first, data)
    _trainer(tmp_path).test(make(resume=True), data)
    assert len((tmp_path / "predictions_b.jsonl").read_text().splitlines()) == 4


def test_a_sample_above_16384_tokens_has_the_same_loss_packed_as_alone_in_its_row(tmp_path: Path) -> None:
    rows = [{"query": "12", "response": "0123456789" * 1650}, {"query": "7", "response": "89" * 60}]
    longest = 17_000
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": longest}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    logged = []
    for batch_size, pack_length in ((2, None), (1, longest)):
        data = InstructionDataModule(
            {"train": rows, "validation": rows[1:]}, CharacterTokenizer(), batch_size,
            max_length=longest, pack_length=pack_length,
        )  # fmt: skip
        backbone = BackboneConfig(config=TINY_QWEN | sizes | heads)
        module = SlotDiffusionModule(backbone, data.built_tokenizer, Hybrid(slot_sizes=(4,)))
        trainer = _trainer(tmp_path, max_steps=1, limit_val_batches=0, log_every_n_steps=1)
        trainer.fit(module, data)
        logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    plain, packed = logged
    assert packed["train/num_positions"] < 0.6 * plain["train/num_positions"]
    for name in ("train/ar", "train/mdm", "train/loss", "train/gradient_norm"):
        assert packed[name] > 0.5
        assert packed[name] == pytest.approx(plain[name], rel=1e-5)
