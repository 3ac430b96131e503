"""Training on rewards from end to end: resuming, two processes, adapters, and bad rewards."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from refusion_lit import SlotDiffusionModule
from refusion_lit.contrib.rl import GroupPolicy, LeftToRight, Reward, rollouts
from refusion_lit.contrib.rl.rollouts import Rollouts
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion, SelfSpeculative
from refusion_lit.evaluation.loop import EvaluationOptions
from refusion_lit.learning.step import OptimizerStep
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.lora import LoraOptions
from refusion_lit.tasks import Additions, Example, InstructionFiles, Mbpp, Task
from refusion_lit.tasks.base import Split
from refusion_lit.types import Prompt
from support.forks import act_at_call
from support.tiny import TINY_QWEN
from tasks.samples import MBPP, write_jsonl


@dataclass(frozen=True, kw_only=True)
class ManyDigits(Reward):
    """The share of different characters in an answer, so that most groups have several rewards."""

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        """Return the shares."""
        assert len(examples) == len(responses)
        return [len(set(text)) / 10 for text in responses]


@dataclass(frozen=True, kw_only=True)
class Broken(Reward):
    """A reward with a fault, which ``how`` names."""

    how: str

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> Any:
        """Fail."""
        assert examples
        if self.how == "raises":
            raise RuntimeError("no answer")
        if self.how == "hangs":
            time.sleep(3)
        if self.how == "exits":
            raise SystemExit(3)
        if self.how == "mapping":
            return dict.fromkeys(range(len(responses)), 1.0)
        if self.how == "infinite":
            return [math.inf, *[0.0] * (len(responses) - 1)]
        few = {"fewer": [0.5], "words": ["good"] * len(responses), "numerals": ["1"] * len(responses), "none": None}
        return few.get(self.how, [0.0 if self.how == "constant" else math.nan] * len(responses))


OBJECTIVE = GroupPolicy(
    likelihood=LeftToRight(slot_size=4), rewards=(ManyDigits(),), group_size=3, max_new_tokens=6, temperature=0.9,
    overlong="zero",  # most answers are cut: with the lowest reward, many groups would have equal rewards
)  # fmt: skip


class Recorded(SlotDiffusionModule):
    """Writes its weights at the end to a file, because a test shares no memory with other processes."""

    path: Path

    def on_train_end(self) -> None:
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        torch.save(weights, f"{self.path}.{self.trainer.global_rank}")


def fit(
    folder: Path,
    objective: GroupPolicy = OBJECTIVE,
    *,
    decoder: Decoder | None = None,
    steps: int = 3,
    batch_size: int = 4,
    ckpt_path: Path | None = None,
    lora: LoraOptions | None = None,
    rows: int = 16,
    task: Task | None = None,
    **options: Any,
) -> tuple[Recorded, dict[str, Tensor]]:
    """Train a tiny hybrid model; return the module, and the weights at the end."""
    task = task or Additions(max_terms=2, num_train=64, num_validation=4, num_test=4)
    data = InstructionDataModule(task, CharacterTokenizer(), batch_size)
    module = Recorded(
        BackboneConfig(config=TINY_QWEN, lora=lora),
        data.built_tokenizer,
        objective,
        decoders={"first": decoder or SelfSpeculative(slot_size=4)},
        decoding=EvaluationOptions(batch_size=rows),
        optimizer=lambda groups: torch.optim.SGD([{**g, "weight_decay": 0.0} for g in groups], lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    )
    module.path = folder / "weights"
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"precision": "64-true", "log_every_n_steps": 1, **options}
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, limit_val_batches=0, callbacks=[saving],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, torch.load(folder / "weights.0")


@dataclass(frozen=True, kw_only=True)
class Copied(Reward):
    """Gives 1 to an answer that begins with the first letter of its query, and 0 to other answers."""

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        """Return 0 or 1."""
        pairs = zip(examples, responses, strict=True)
        return [float(response[:1] == example.query[0]) for example, response in pairs]


def test_a_first_example_that_is_skipped_stops_no_training(tmp_path: Path) -> None:
    lines = [json.dumps({"query": query, "response": "a"}) for query in ("ab\u00e9", "ab", "ba", "bb", "aa")]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = InstructionFiles(train=f"{tmp_path}/rows.jsonl", validation_fraction=0.0, malformed="skip")
    data = InstructionDataModule(task, CharacterTokenizer(characters="ab"), 4)
    module = SlotDiffusionModule(
        BackboneConfig(config=TINY_QWEN), data.built_tokenizer, OBJECTIVE, {"first": SelfSpeculative(slot_size=4)}
    )
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    assert trainer.global_step == 1


def test_the_longest_prompt_leaves_room_for_its_answers(tmp_path: Path) -> None:
    """A prompt that is too long is refused before the first step, not in the step that needs it."""
    lines = [json.dumps({"query": query, "response": "a"}) for query in ("ab", "ba", "ab" * 20, "aa")]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = InstructionFiles(train=f"{tmp_path}/rows.jsonl", validation_fraction=0.0)
    data = InstructionDataModule(task, CharacterTokenizer(), 1, max_length=48)
    config = {**TINY_QWEN, "max_position_embeddings": 48}
    objective = replace(OBJECTIVE, max_new_tokens=16)
    decoders: dict[str, Decoder | None] = {"first": SelfSpeculative(slot_size=4)}
    module = SlotDiffusionModule(BackboneConfig(config=config), data.built_tokenizer, objective, decoders)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, logger=False, limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"train:rows\.jsonl:3: expected at most 32 tokens"):
        trainer.fit(module, data)
    assert trainer.global_step == 0


def test_a_small_model_learns_to_copy_from_rewards_alone(tmp_path: Path) -> None:
    """The model learns to write the first letter of the prompt, from random weights.

    The rewards of one letter in three are right by chance. With the seeds 0 to 3, training ends with rewards of 1.
    """
    queries = ["".join(letters) for letters in product("abc", repeat=4)]
    lines = [json.dumps({"query": query, "response": query[0]}) for query in queries]
    (tmp_path / "copy.jsonl").write_text("\n".join(lines))
    data = InstructionDataModule(InstructionFiles(train=f"{tmp_path}/copy.jsonl"), CharacterTokenizer(), 16)
    objective = GroupPolicy(likelihood=LeftToRight(slot_size=4), rewards=(Copied(),), group_size=8, max_new_tokens=4)
    module = SlotDiffusionModule(
        BackboneConfig(config=TINY_QWEN),
        data.built_tokenizer,
        objective,
        decoders={"first": SelfSpeculative(slot_size=4)},
        decoding=EvaluationOptions(batch_size=128),
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.02),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    )
    rewards = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            rewards.append(float(trainer.callback_metrics["train/reward"]))

    trainer = L.Trainer(
        accelerator="cpu", max_steps=60, logger=False, limit_val_batches=0, callbacks=[Watch()], log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-5:]) / 5 > 0.9


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **{"rtol": 0, "atol": 0, **tolerance})


@pytest.mark.parametrize("num_updates", [1, 3])
def test_a_resumed_run_ends_where_the_unbroken_one_does(tmp_path: Path, num_updates: int) -> None:
    """With three updates per roll-out, the run is interrupted between two updates on the same answers."""
    objective = replace(OBJECTIVE, num_updates=num_updates)
    single: Any = {"precision": "32-true", "steps": 5}
    _, expected = fit(tmp_path / "whole", objective, **single)
    _, actual = fit(tmp_path / "resumed", objective, ckpt_path=tmp_path / "whole" / "step=2.ckpt", **single)
    assert_equal(actual, expected)
    stored = torch.load(tmp_path / "whole" / "step=2.ckpt", weights_only=True)["state_dict"]
    assert any(not torch.equal(stored[f"backbone.{name}"], value) for name, value in expected.items())


def test_a_second_fit_rolls_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fit ends before all updates on its answers; the second fit has another task, and must not use them."""
    module, _ = fit(tmp_path, replace(OBJECTIVE, num_updates=4), steps=1)
    assert module.step_source is not None
    assert module.step_source.pending
    decoded: list[str] = []
    decode = Rollouts._decode_groups

    def record(self: Rollouts, prompts: Sequence[Prompt], number: int) -> Any:
        decoded.extend(prompt.id for prompt in prompts)
        return decode(self, prompts, number)

    monkeypatch.setattr(Rollouts, "_decode_groups", record)
    task = InstructionFiles(train=str(write_rows(tmp_path / "other.jsonl", 16)), validation_fraction=0.5)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, limit_val_batches=0, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    trainer.fit(module, InstructionDataModule(task, CharacterTokenizer(), 4))
    assert len(decoded) == 4  # the prompts of a batch


def write_rows(path: Path, num_rows: int) -> Path:
    path.write_text("".join(json.dumps({"query": f"{i}+1", "response": str(i + 1)}) + "\n" for i in range(num_rows)))
    return path


def test_dropout_is_refused_as_it_changes_likelihoods(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.backbone\.lora\.dropout: expected no dropout.* got 0\.3"):
        fit(tmp_path, lora=LoraOptions(rank=2, alpha=4.0, dropout=0.3))


def test_code_that_may_not_run_is_no_reward(tmp_path: Path) -> None:
    rows = [MBPP | {"task_id": number} for number in (11, 511, *range(601, 609))]
    task = Mbpp(files=write_jsonl(tmp_path / "mbpp.jsonl", rows))
    with pytest.raises(ValueError, match="allow_code_execution: expected true"):
        fit(tmp_path / "run", replace(OBJECTIVE, rewards=()), task=task)


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        pytest.param(ManyDigits, "rewards", 3, id="roll-out"),
        pytest.param(torch.optim.SGD, "step", 1 + 3, id="update"),  # the optimizer is tried before the training
    ],
)
def test_a_killed_run_ends_where_the_unbroken_one_does(tmp_path: Path, owner: type, method: str, call: int) -> None:
    """The process is killed while the third answers are rewarded, and in the third update."""
    single: Any = {"precision": "32-true", "steps": 4}
    _, expected = fit(tmp_path / "whole", **single)

    def fit_and_die() -> None:
        act_at_call(owner, method, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        fit(tmp_path / "killed", **single)

    process = get_context("fork").Process(target=fit_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    saved = sorted(path.name for path in (tmp_path / "killed").glob("*.ckpt"))
    assert saved == ["step=1.ckpt", "step=2.ckpt"]
    _, actual = fit(tmp_path / "resumed", ckpt_path=tmp_path / "killed" / saved[-1], **single)
    assert_equal(actual, expected)


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2)], ids=["all weights", "adapter"])
def test_two_processes_have_the_gradient_of_one(tmp_path: Path, lora: LoraOptions | None) -> None:
    """With adapters, the base without them is the reference in both processes."""
    objective = OBJECTIVE if lora is None else replace(OBJECTIVE, kl_weight=0.1)
    _, expected = fit(tmp_path / "one", objective, steps=2, batch_size=4, accumulate_grad_batches=1, lora=lora)
    _, actual = fit(tmp_path / "two", objective, steps=2, batch_size=2, devices=2, strategy="ddp_fork", lora=lora)
    assert_equal(actual, expected, rtol=1e-7, atol=1e-9)
    trained = [bool(value.any()) for name, value in actual.items() if "lora_b" in name.lower()]  # zero at first
    assert trained if lora else not trained
    assert all(trained)


def test_an_adapter_learns_beside_its_frozen_reference(tmp_path: Path) -> None:
    objective = replace(OBJECTIVE, kl_weight=0.1)
    module, weights = fit(tmp_path, objective, lora=LoraOptions(rank=2))
    assert module.trainer.callback_metrics["train/kl"] > 0
    assert {name for name in weights if "lora" in name.lower()}


def test_what_a_rollout_showed_is_logged(tmp_path: Path) -> None:
    module, _ = fit(tmp_path, steps=1)
    logged = {name.removeprefix("train/"): float(value) for name, value in module.trainer.callback_metrics.items()}
    assert 0 < logged["reward"] <= 1
    assert 0.5 < logged["distinct_answers"] <= 1
    assert logged["engine_kl"] < 1e-12
    assert logged["entropy"] > 0
    assert logged["length"] > 0
    assert logged["clipped_low"] == logged["clipped_high"] == 0
    assert {"overlong", "equal_groups", "tokens_per_forward", "rollout_seconds", "update_seconds"} <= logged.keys()
    assert "train/reward" in module.trainer.progress_bar_metrics


def test_a_rollout_is_logged_between_updates_too(tmp_path: Path) -> None:
    """Answers are drawn in every second step, and every other one is logged."""
    module, _ = fit(tmp_path, replace(OBJECTIVE, num_updates=2), steps=2, log_every_n_steps=2)
    assert 0 < float(module.trainer.callback_metrics["train/reward"]) <= 1


def test_a_shorter_last_step_of_an_epoch_has_answers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches an epoch, in steps of three and one: each step runs all that it has begun."""
    events: list[str] = []
    begin_step, take_batch = OptimizerStep.begin, OptimizerStep.take

    def begin(self: OptimizerStep, corrupted: Sequence[Any]) -> None:
        events.append(f"begin {len(corrupted)}")
        begin_step(self, corrupted)

    def take(self: OptimizerStep, index: int) -> Any:
        events.append("take")
        return take_batch(self, index)

    monkeypatch.setattr(OptimizerStep, "begin", begin)
    monkeypatch.setattr(OptimizerStep, "take", take)
    objective = replace(OBJECTIVE, num_updates=3, group_size=2, max_new_tokens=2)
    fit(tmp_path, objective, steps=4, batch_size=16, accumulate_grad_batches=3)
    assert events == ["begin 3", "take", "take", "take", "begin 1", "take"] * 2


@pytest.mark.parametrize(("how", "what"), [("constant", "got 0"), ("nan", "NaN")])
def test_rewards_that_teach_nothing_change_nothing(tmp_path: Path, how: str, what: str) -> None:
    objective = replace(OBJECTIVE, rewards=(Broken(how=how),))
    weights = []
    for steps in (1, 2):
        with pytest.warns(UserWarning, match=rf"^Broken\.rewards: .*{what}"):
            weights.append(fit(tmp_path / str(steps), objective, steps=steps)[1])
    assert_equal(*weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "RuntimeError.*no answer"),
        ("hangs", r"within 0\.2 s"),
        ("fewer", "12 .* got 1"),  # four prompts with groups of three answers
        ("words", "'good'"),
        ("numerals", "'1'"),
        ("none", "TypeError"),
        ("exits", "SystemExit"),
        ("mapping", "mapping"),
        ("infinite", "inf"),
    ],
)
def test_a_broken_reward_ends_the_run_in_one_line(
    tmp_path: Path, how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "REWARD_SECONDS", 0.2)
    with pytest.raises(ValueError, match=rf"^Broken\.rewards: expected [^\n]*{message}[^\n]*$"):
        fit(tmp_path, replace(OBJECTIVE, rewards=(Broken(how=how),)))


@dataclass(frozen=True, kw_only=True)
class FailsOnce(ManyDigits):
    """Fails at the third call of all its instances."""

    calls: ClassVar[list[bool]] = []

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        """Return the rewards, or fail."""
        self.calls.append(True)
        if len(self.calls) == 3:
            raise RuntimeError("the judge is out")
        return list(super().rewards(examples, responses))


def test_a_run_that_a_reward_ended_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    objective = replace(OBJECTIVE, rewards=(FailsOnce(),))
    single: Any = {"precision": "32-true", "steps": 4}
    FailsOnce.calls.clear()
    with pytest.raises(ValueError, match="the judge is out"):
        fit(tmp_path / "ended", objective, **single)
    _, resumed = fit(tmp_path / "resumed", objective, ckpt_path=tmp_path / "ended" / "step=2.ckpt", **single)
    _, whole = fit(tmp_path / "whole", objective, **single)
    assert_equal(resumed, whole)


def test_a_run_resumed_with_another_reward_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, steps=1)
    other = replace(OBJECTIVE, rewards=(ManyDigits(weight=2.0),))
    with pytest.raises(ValueError, match=r"^objective\.rewards: expected .*'weight': 1\.0.* got .*'weight': 2\.0"):
        fit(tmp_path / "resumed", other, ckpt_path=tmp_path / "step=1.ckpt")
    namesake = type("ManyDigits", (ManyDigits,), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=r"^objective\.rewards: expected .* got .*elsewhere"):
        fit(tmp_path / "resumed", replace(OBJECTIVE, rewards=(namesake(),)), ckpt_path=tmp_path / "step=1.ckpt")


class PlainTask(Task):
    """A task that is no dataclass, so that its ``repr`` has an address."""

    metrics = ()

    def examples(self, split: Split) -> Sequence[Example]:
        """Return some sums."""
        return Additions(max_terms=2, num_train=64, num_validation=4, num_test=4).examples(split)

    def score(self, example: Example, response: str) -> float:
        """Return more for more digits."""
        return sum(character.isdigit() for character in response) / 8


def test_a_run_is_resumed_whose_task_rewards(tmp_path: Path) -> None:
    objective = replace(OBJECTIVE, rewards=())
    single: Any = {"precision": "32-true", "steps": 2}
    _, whole = fit(tmp_path, objective, task=PlainTask(), **single)
    last = tmp_path / "step=1.ckpt"
    _, resumed = fit(tmp_path / "resumed", objective, task=PlainTask(), ckpt_path=last, **single)
    assert_equal(resumed, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": ReFusion(slot_size=4)}, r"^objective\.likelihood: expected .*ReFusion"),
        ({"decoder": Autoregressive()}, r"^objective\.likelihood: expected .*Autoregressive"),
        ({"rows": 2**40}, r"^model\.decoding\.batch_size: expected .* GB"),
        ({"objective": replace(OBJECTIVE, group_size=2**34)}, r"^data\.batch_size: expected .* GB"),
        ({"objective": replace(OBJECTIVE, kl_weight=0.1)}, r"^objective\.kl_weight: expected 0"),
    ],
    ids=str,
)
def test_impossible_runs_are_refused_before_work(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, **options)
    assert not list(tmp_path.glob("*.ckpt"))
