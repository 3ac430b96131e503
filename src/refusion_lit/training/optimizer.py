"""The optimizer step: parameter groups, the default learning-rate schedule, and checks of precision and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from refusion_lit.modeling.load import decoding_dtype
from refusion_lit.training.callbacks import last_checkpoint
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import check_options, require

_NUM_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up to the optimizer's learning rate, then cosine decay.

    Attributes:
        warmup_steps: Number of optimizer steps with a rising learning rate, at least 0.
        final_lr_ratio: Final learning rate divided by the peak, in [0, 1].
    """

    ranges = {"warmup_steps": 0, "final_lr_ratio": "[0, 1]"}
    warmup_steps: int = 100
    final_lr_ratio: float = 0.02

    def __post_init__(self) -> None:
        check_options(self, "model.schedule.")

    def __call__(self, optimizer: Optimizer, num_steps: int) -> LambdaLR:
        """Return the schedule.

        Args:
            optimizer: Has the peak learning rates.
            num_steps: Number of steps in the whole training; afterwards, the rate stays constant.
        """
        if self.warmup_steps >= num_steps:
            rank_zero_warn(
                f"model.schedule.warmup_steps: expected fewer than the {num_steps} steps of this training, got "
                f"{self.warmup_steps}: the learning rate rises until the end of training. Lower it, or train longer."
            )

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(self.warmup_steps, 1))
            done = min(max(step - self.warmup_steps, 0) / max(num_steps - self.warmup_steps, 1), 1.0)
            return rise * (self.final_lr_ratio + (1 - self.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))

        return LambdaLR(optimizer, factor)


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the trainable parameters: matrices get the optimizer's weight decay, norms and biases none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def rehearse(
    module: nn.Module, make: OptimizerCallable | None, make_schedule: LRSchedulerCallable, num_steps: float
) -> None:
    """Try an optimizer and its schedule on small parameters, because many errors occur only in a step.

    Args:
        module: The module to be trained.
        make: Makes the optimizer from parameter groups; AdamW by default.
        make_schedule: Makes the schedule.
        num_steps: Number of steps in the training; infinite if unknown.

    Raises:
        ValueError: If the optimizer cannot take a step with dense gradients, or calls the loss more than once in a
            step, or the schedule has no rate for a step.
    """
    trained = {p.ndim: p for p in module.parameters() if p.requires_grad}.values()
    small = nn.ParameterList(nn.Parameter(torch.zeros([2] * p.ndim, device=p.device)) for p in trained)
    optimizer = make_optimizer(small, make)
    scheduler = make_scheduler(optimizer, make_schedule)
    num_calls = 0

    def loss() -> float:
        nonlocal num_calls
        num_calls += 1
        for parameter in small:
            parameter.grad = torch.zeros_like(parameter)
        return 0.0

    with _renamed_errors("model.optimizer"):
        optimizer.step(loss)
    expected = "an optimizer that computes the loss once in a step"
    got, fix = f"{type(optimizer).__name__}, which computes it {num_calls} times", "name one such as torch.optim.AdamW"
    require(num_calls == 1, "model.optimizer", expected, got, fix)
    with _renamed_errors("model.lr_scheduler"):
        scheduler.step()
        if 1 < num_steps < math.inf:
            scheduler.last_epoch = int(num_steps) - 1
            scheduler.step()


@contextmanager
def _renamed_errors(option: str) -> Iterator[None]:
    """Turn any error of a library's class, which names no option, into a ValueError with the option."""
    try:
        yield
    except Exception as error:
        reason = error_reason(error).rstrip(".")
        raise ValueError(f"{option}: {reason}; correct {option}.init_args, or name another class.") from error


def make_optimizer(module: nn.Module, make: OptimizerCallable | None) -> Optimizer:
    """Make the optimizer for a module's parameters.

    Args:
        module: The module.
        make: Makes the optimizer from parameter groups; AdamW by default.

    Raises:
        ValueError: If the optimizer refuses its options.
    """
    make = make or partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.98), weight_decay=0.01)
    with _renamed_errors("model.optimizer"):
        optimizer = make(parameter_groups(module))
    has_step = type(optimizer).step is not Optimizer.step
    fix = "name an optimizer with a method step, such as torch.optim.AdamW"
    require(has_step, "model.optimizer.class_path", "an optimizer's class", type(optimizer).__name__, fix)
    warn_of_lost_updates(optimizer)
    return optimizer


def make_scheduler(optimizer: Optimizer, make: LRSchedulerCallable) -> LRScheduler:
    """Make the learning-rate schedule, which is advanced after every step.

    Raises:
        ValueError: If the schedule refuses its options, or depends on more than the number of the step.
    """
    scheduler = None
    with _renamed_errors("model.lr_scheduler"), suppress(NotImplementedError):  # of the base class
        scheduler = make(optimizer)
    is_schedule = scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau)
    expected = "a schedule that depends on the step alone"
    got = type(scheduler).__name__ if scheduler else LRScheduler.__name__
    fix = "name a schedule such as CosineAnnealingLR, or leave the option out to use model.schedule"
    require(is_schedule, "model.lr_scheduler.class_path", expected, got, fix)
    assert scheduler is not None
    return scheduler


def read_optimizer_options(optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return options of a new optimizer and its schedule as plain values, for :func:`apply_optimizer_options`."""
    groups = [
        {"lr": group.get("initial_lr", group["lr"])}
        | {name: value for name, value in group.items() if name not in ("params", "param_names", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
    # A LambdaLR does not store its function, and its other state values are no options.
    state = {} if isinstance(scheduler, LambdaLR) else scheduler.state_dict()
    plain = {name: value for name, value in state.items() if isinstance(value, int | float | str | None)}
    return {"groups": groups, "schedule": {"class_path": type(scheduler).__name__, **plain}}


def apply_optimizer_options(
    optimizer: Optimizer, scheduler: LRScheduler, before: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Apply options that differ from the checkpoint's options. Lightning has restored the latter.

    The learning rates of a ``LambdaLR``, such as the default schedule, are computed again.

    Args:
        optimizer: The restored optimizer; changed in place.
        scheduler: Its restored schedule; changed in place.
        before: The result of :func:`read_optimizer_options` in the checkpoint.
        options: Result of :func:`read_optimizer_options` before the state was restored.

    Raises:
        ValueError: If the schedule has other options, if the learning rate has changed and the schedule is no factor of
            it, or if an option needs averages that the checkpoint lacks.
    """
    fix = "leave it out, or start a new run from the exported weights as model.backbone.source"
    expected = f"{before['schedule']}, as the run was started with"
    same = before["schedule"] == options["schedule"]
    require(same, "model.lr_scheduler", expected, options["schedule"], fix)
    is_factor = isinstance(scheduler, LambdaLR)
    need_averages = ("amsgrad", "centered", *(("momentum",) if isinstance(optimizer, torch.optim.RMSprop) else ()))
    for group, old, new in zip(optimizer.param_groups, before["groups"], options["groups"], strict=True):
        changed = {name: value for name, value in new.items() if old.get(name, value) != value}
        for name in need_averages:
            is_possible = bool(old.get(name)) or not changed.get(name)
            expected = f"{old.get(name)}, because the checkpoint has no running average for another value"
            require(is_possible, f"model.optimizer.{name}", expected, changed.get(name), fix)
        if "lr" in changed:
            expected = f"{old['lr']}, because {type(scheduler).__name__} cannot change it within a run"
            require(is_factor, "model.optimizer.lr", expected, changed.pop("lr"), fix)
            group["initial_lr"] = new["lr"]
        group.update(changed)
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        factors = [function(scheduler.last_epoch) for function in scheduler.lr_lambdas]
        scheduler._last_lr = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate


def warn_of_lost_updates(optimizer: Optimizer) -> None:
    """Warn if an optimizer from ``torch.optim`` trains bfloat16 or float16 weights.

    These types have 8 and 11 significant bits: an update below 0.2 % (0.02 %) of a weight is rounded away, and most
    updates in fine-tuning are smaller. Optimizers from elsewhere may keep float32 master weights or round
    stochastically, so they are trusted. ``experiments/precision`` measures the difference.
    """
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]} & {torch.bfloat16, torch.float16}
    if dtypes and type(optimizer).__module__.startswith("torch.optim"):
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        rank_zero_warn(
            f"trainer.precision: expected float32 weights for training with {type(optimizer).__name__}, got {names}, "
            "which rounds small updates away, so that the loss falls much less. Set model.backbone.dtype to float32 "
            "and trainer.precision to bf16-mixed, or use an optimizer with float32 master weights."
        )


def is_slow_precision(precision: str, device: torch.device) -> bool:
    """Return whether a device is a processor without instructions for the precision's type."""
    dtype = _compute_dtype(precision)
    return decoding_dtype({"dtype": dtype}, device) != dtype


def _compute_dtype(precision: str) -> str:
    return "bfloat16" if precision.startswith("bf16") else "float16" if precision.startswith("16") else "float32"


def warn_of_slow_precision(precision: str, device: torch.device) -> None:
    """Warn if a processor has no instructions for the precision's type: training would take many times as long."""
    if is_slow_precision(precision, device):
        rank_zero_warn(
            "trainer.precision: expected 32-true on this processor, which has no instructions for "
            f"{_compute_dtype(precision)}, got {precision}, which takes many times as long. Set it to 32-true, or use "
            "a GPU."
        )


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """Return the norm of all gradients in an optimizer."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def check_finite(trainer: L.Trainer, loss: Tensor, gradient_norm: Tensor, sample_ids: Sequence[str]) -> None:
    """Stop all processes if any process has a loss or gradient that is infinite or NaN.

    In float16, a loss scaler skips steps with infinite gradients and lowers the scale, so only the loss is checked.

    Args:
        trainer: The trainer, before an optimizer step.
        loss: The step's loss on this process.
        gradient_norm: The norm of the step's gradient.
        sample_ids: Ids of the step's samples on this process.

    Raises:
        ValueError: Naming step, samples and the last checkpoint.
    """
    is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    values = {"loss": loss} if is_scaled else {"loss": loss, "gradient norm": gradient_norm}
    figures = dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
    wrong = [f"{name} {value}" for name, value in figures.items() if not abs(value) < float("inf")]
    if not trainer.strategy.reduce_boolean_decision(bool(wrong), all=False):
        return
    what = ", ".join(wrong) or "finite figures here, but not on another process"
    more = f" and {len(sample_ids) - _NUM_SHOWN} more" if len(sample_ids) > _NUM_SHOWN else ""
    shown = ", ".join(sample_ids[:_NUM_SHOWN]) + more
    raise ValueError(
        f"fit: expected a finite loss and gradient, got {what} at step {trainer.global_step + 1} (samples {shown}). "
        f"The last checkpoint is {last_checkpoint(trainer) or 'none'}. Lower the learning rate, set "
        "trainer.gradient_clip_val, or look at these samples."
    )
