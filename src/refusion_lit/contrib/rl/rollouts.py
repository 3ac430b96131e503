"""Roll-outs for training on rewards: answers with advantages, decoded in the training process."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import lightning as L
import torch
from torch.distributed.fsdp import FSDPModule

from refusion_lit.contrib.rl.likelihood import Answers, LaidOut
from refusion_lit.contrib.rl.objective import GroupPolicy, Reward, group_advantages, replace_overlong_rewards
from refusion_lit.contrib.rl.trajectory import Trajectory, TrajectoryRecorder
from refusion_lit.data.batches import collate_responses
from refusion_lit.data.examples import EncodedExample, load_examples
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.decoding import Generation, check_prompts
from refusion_lit.evaluation.loop import Evaluation
from refusion_lit.evaluation.predictions import class_and_options
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.step import OptimizerStep
from refusion_lit.noise import stable_key
from refusion_lit.tasks.base import Example, Task
from refusion_lit.tasks.code import CodeTask
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.training.step_source import StepSource
from refusion_lit.types import Prompt
from refusion_lit.utils.require import require

_STATE = "refusion_lit_rollouts"

REWARD_SECONDS = 60.0
"""Time limit for rewarding all answers in a step."""


@dataclass(frozen=True)
class _Answer:
    """An answer that was rolled out."""

    row: Generation
    trajectory: Trajectory
    reward: float
    advantage: float


class Rollouts(StepSource):
    """Step source that decodes and rewards groups of answers. Its state is part of checkpoints.

    Roll-outs depend only on weights, seed, step and prompt, so a resumed run decodes the same answers.

    Args:
        objective: The objective.
        evaluation: Decoders (the first decoder makes the roll-outs), sampling and decoding options.
        seed: Seed of the noise.

    Attributes:
        pending: Micro-batches by remaining update on the last roll-out.
        figures: Figures of the last roll-out, by name.
    """

    shown = ("reward", "rollout_seconds", "update_seconds")
    objective: GroupPolicy

    def __init__(self, objective: GroupPolicy, evaluation: Evaluation, seed: int) -> None:
        super().__init__(objective, evaluation, seed)
        self.pending: list[list[LaidOut]] = []
        self.figures = {}
        self._finished = 0.0
        self._restored: Mapping[str, Any] | None = None
        self._examples: dict[str, Example] = {}

    def start(self, module: SlotDiffusionModule) -> None:
        """Check before training that answers can be decoded, and have a likelihood and a reward.

        Raises:
            ValueError: If an option is impossible.
        """
        data = module.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] - Lightning sets it
        model = module.text_model()
        expected = "the data of an InstructionDataModule, which names the task"
        require(isinstance(data, InstructionDataModule), "datamodule", expected, data, "pass it to the trainer")
        options = self.objective
        self.pending, self._examples = [], {}  # an earlier fit may have filled them
        self._model = model
        self._data = data
        self._decoder = next(iter(self.evaluation.decoders(model).values()))
        sampling = self.evaluation.sampling
        self._sampling = replace(sampling, temperature=options.temperature, max_new_tokens=options.max_new_tokens)
        options.check(self._decoder, self._sampling)
        self._decoder.check(self._sampling)
        expected = "a strategy that keeps whole weights, as roll-outs need them"
        require(not isinstance(model.backbone, FSDPModule), "trainer.strategy", expected, "FSDP2", "use ddp")
        has_reference = options.kl_weight == 0 or model.backbone.adapters is not None
        fix = "set model.backbone.lora.rank: the base under the adapters is the reference"
        require(has_reference, "objective.kl_weight", "0 without adapters", options.kl_weight, fix)
        dropout = max((layer.p for layer in model.backbone.modules() if isinstance(layer, torch.nn.Dropout)), default=0)
        expected = "no dropout, which changes the likelihood of an answer from forward to forward"
        require(dropout == 0, "model.backbone.lora.dropout", expected, dropout, "set it to 0")
        self._rewards: Sequence[Reward | Task] = options.rewards or (data.task,)
        self._described = repr([(type(reward).__module__, class_and_options(reward)) for reward in self._rewards])
        for reward in self._rewards:
            if isinstance(reward, CodeTask):
                _ = reward.sandbox.applied  # refuses to run code, or weak isolation
        prompt = data.training_prompt()
        if model.backbone.traits.predictions is not None:
            model.check_decoder(self._decoder)
        check_prompts(model.model_for(self._decoder), self._decoder, [prompt], self._sampling, None)
        self._check_memory(len(prompt.token_ids))
        if self._restored is not None:
            self._restore(self._restored, module.global_rank)

    def _check_memory(self, prompt_length: int) -> None:
        """Refuse a KV cache, or layer inputs in an update, that exceed the host's or device's memory."""
        backbone = self._model.backbone
        config = backbone.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = config.num_hidden_layers * backbone.head.weight.itemsize
        per_width = (prompt_length + self._sampling.max_new_tokens) * per_token
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if backbone.device.type == "cuda":
            memory = torch.cuda.mem_get_info(backbone.device)[1]
        parts = (
            ("model.decoding.batch_size", self.evaluation.options.batch_size, 2 * heads * size),
            ("data.batch_size", self._data.batch_size, self.objective.group_size * config.hidden_size),
        )
        for option, number, width in parts:
            needed = number * width * per_width
            expected = f"answers that fit into {memory / 2**30:.1f} GB"
            got = f"{number}, which takes at least {needed / 2**30:.1f} GB"
            require(needed < memory, option, expected, got, "lower it, or objective.max_new_tokens")

    def corrupt(self, module: SlotDiffusionModule, step: OptimizerStep) -> list[CorruptedBatch]:
        """Return the answers for an update: pending answers, or a new roll-out for the prompts of the step.

        Args:
            module: Lays answers out for training.
            step: The prompts; responses in the data are not used.
        """
        device = self._model.backbone.device
        if not self.pending or len(self.pending[0]) != len(step.batches):  # the last step of an epoch may be shorter
            self.pending.clear()
            with torch.autocast(device.type, enabled=False):  # the fused backbone decodes without it
                answers = self._answers(step.batches, module.global_step)
            for update in range(self.objective.num_updates):
                # A likelihood may be a bound with masks at random places, as MaskedBound in
                # experiments/policy_estimators. Sample keys determine the noise, so changed keys give new masks in
                # every update.
                update_key = stable_key("update", update, module.global_step)
                keyed = [replace(batch, sample_keys=batch.sample_keys ^ update_key) for batch in answers]
                self.pending.append([self._with_fixed_terms(module.corrupt(batch)) for batch in keyed])
        return [batch.to(device) for batch in self.pending.pop(0)]

    def _with_fixed_terms(self, corrupted: CorruptedBatch) -> LaidOut:
        """Add log-probabilities that stay fixed during updates: old and reference log-probabilities."""
        assert isinstance(corrupted, LaidOut)
        model = self._model.backbone
        passes: dict[str, AbstractContextManager[None]] = {}
        if self.objective.num_updates > 1:
            passes["old"] = nullcontext()
        if self.objective.kl_weight > 0:
            passes["reference"] = model.model.disable_adapter()
        for name, context in passes.items():
            with torch.no_grad(), context:
                hidden = model(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
                values = self.objective.log_probabilities(hidden, model.head, corrupted)[0]
            corrupted = replace(corrupted, **{name: values})
        return corrupted

    def _answers(self, step: Sequence[ResponseBatch], global_step: int) -> list[Answers]:
        """Decode and reward a group of answers for each prompt; return the answers by micro-batch."""
        started = time.perf_counter()
        update_seconds = started - self._finished if self._finished else 0.0
        parts = [_prompts(batch) for batch in step]
        groups = self._decode_groups([prompt for part in parts for prompt in part], global_step)
        self.figures = self._figures(list(groups.values()))
        self._finished = time.perf_counter()
        self.figures |= {"rollout_seconds": self._finished - started, "update_seconds": update_seconds}
        return [self._batch([groups[prompt.id] for prompt in part]) for part in parts]

    def _decode_groups(self, prompts: Sequence[Prompt], global_step: int) -> dict[str, list[_Answer]]:
        """Return a group of rewarded answers for each prompt, by the prompt's id."""
        size = self.objective.group_size
        copies = [replace(prompt, id=f"{prompt.id}/{i}") for prompt in prompts for i in range(size)]
        recorder = TrajectoryRecorder(self._decoder)
        # The last part of the key once counted repeated roll-outs. It stays, so that old runs decode the same answers.
        sampling = replace(self._sampling, seed=stable_key("rollout", self.seed, global_step, 0))
        rows = self.evaluation.decode(self._model, self._decoder, copies, [recorder], sampling, trace=True).rows
        totals = self._sum_rewards([prompt for prompt in prompts for _ in range(size)], rows)
        trajectories = [recorder.trajectories[index] for index in range(len(rows))]
        rewards = torch.tensor(totals, dtype=torch.float64).view(-1, size)
        is_overlong = torch.tensor([row.finish_reason == "length" for row in rows]).view(-1, size)
        rewards = replace_overlong_rewards(rewards, is_overlong, self.objective.overlong)
        advantages = group_advantages(rewards, scale=self.objective.scale_rewards)
        columns = (rows, trajectories, rewards.flatten().tolist(), advantages.flatten().tolist())
        answers = [_Answer(*parts) for parts in zip(*columns, strict=True)]
        return {prompt.id: answers[i * size : (i + 1) * size] for i, prompt in enumerate(prompts)}

    def _sum_rewards(self, prompts: Sequence[Prompt], rows: Sequence[Generation]) -> list[float]:
        """Return weighted sums of rewards by answer; NaN for dropped answers.

        Warn if a reward drops all answers, or gives all answers in the first roll-out the same value. In later
        roll-outs, equal values may mean that the model has learnt the task.
        """
        is_first = not self.figures
        examples = [self._example(prompt.id) for prompt in prompts]
        texts = [row.text for row in rows]
        totals = [0.0] * len(rows)
        for reward in self._rewards:
            values = _checked_rewards(reward, examples, texts)
            distinct = {value for value in values if not math.isnan(value)}
            if not distinct or (len(distinct) == 1 and is_first):
                what = f"{distinct.pop():g}" if distinct else "NaN"
                name = type(reward).__name__
                warnings.warn(
                    f"{name}.rewards: all answers of a roll-out got {what}; answers with equal rewards teach nothing",
                    stacklevel=2,
                )
            weight = reward.weight if isinstance(reward, Reward) else 1.0
            totals = [total + weight * value for total, value in zip(totals, values, strict=True)]
        return totals

    def _example(self, name: str) -> Example:
        """Return a training example by id; for speed, first by the index that ends most ids."""
        examples = load_examples(self._data.task, "train")
        index = name.rpartition("-")[2]
        if index.isdigit() and int(index) < len(examples) and (example := examples[int(index)]).id == name:
            return example
        self._examples = self._examples or {example.id: example for example in examples}
        return self._examples[name]

    def _batch(self, groups: Sequence[Sequence[_Answer]]) -> Answers:
        answers = [answer for group in groups for answer in group]
        samples = [EncodedExample(a.row.id, a.trajectory.prompt_ids.tolist(), a.row.token_ids) for a in answers]
        batch = collate_responses(samples, self._model.backbone.special_tokens.pad_token_id)
        engine = torch.full(batch.input_ids.shape, math.nan, dtype=torch.float64)
        for row, answer in enumerate(answers):
            for position, value in engine_log_probabilities(answer.row, answer.trajectory).items():
                engine[row, position] = value
        advantages = torch.tensor([answer.advantage for answer in answers], dtype=torch.float64)
        trajectories = [answer.trajectory for answer in answers]
        return Answers(**vars(batch), advantages=advantages, engine=engine, trajectories=trajectories)

    def _figures(self, groups: Sequence[Sequence[_Answer]]) -> dict[str, float]:
        """Compute the figures of a roll-out."""
        answers = [answer for group in groups for answer in group]
        rows = [answer.row for answer in answers]
        valid = [answer.reward for answer in answers if not math.isnan(answer.reward)]
        num_distinct = sum(len({tuple(answer.row.token_ids) for answer in group}) for group in groups)
        num_tokens = sum(row.num_tokens for row in rows)
        return {
            "reward": fmean(valid) if valid else math.nan,
            "dropped_rewards": float(len(answers) - len(valid)),
            "length": num_tokens / len(rows),
            "distinct_answers": num_distinct / len(rows),
            "equal_groups": sum(not any(answer.advantage for answer in group) for group in groups) / len(groups),
            "overlong": sum(row.finish_reason == "length" for row in rows) / len(rows),
            "tokens_per_forward": num_tokens / sum(row.num_forwards for row in rows),
        }

    def on_save_checkpoint(self, trainer: L.Trainer, _: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the pending updates of all processes, so that a run resumes between updates on the same answers."""
        state = [[vars(batch) for batch in update] for update in self.pending]
        states: list[Any] = [state] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, state)
        checkpoint[_STATE] = {"pending": states, "rewards": self._described}

    def on_load_checkpoint(self, _: L.Trainer, __: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the saved state until :meth:`start` restores it."""
        self._restored = checkpoint.get(_STATE)

    def _restore(self, state: Mapping[str, Any], rank: int) -> None:
        fix = "give the rewards of the resumed run, or start a new run from its weights"
        are_same = state["rewards"] == self._described
        require(are_same, "objective.rewards", state["rewards"], self._described, fix)
        pending = state["pending"]
        fits = rank < len(pending) or not pending[0]
        fix = "resume with as many processes as before, or set num_updates to 1"
        require(fits, "trainer.devices", f"{len(pending)} processes", f"process {rank + 1}", fix)
        self.pending = [[LaidOut(**values) for values in update] for update in pending[rank % len(pending)]]
        self._restored = None


def engine_log_probabilities(row: Generation, trajectory: Trajectory) -> dict[int, float]:
    """Return the log-probabilities with which the engine drew a traced answer's tokens, by position.

    A forward may draw a place several times. Inside a slot, the exact draw comes first, and drafts follow. At a slot's
    first place, the exact draw comes last: the last group of masks sees all text before the slot.
    """
    values = {}
    start = len(trajectory.prompt_ids)
    for entry in row.trace:
        for position in entry.accepted:
            draws = [i for i, other in enumerate(entry.positions) if other == position]
            is_first = trajectory.slot_size is not None and (position - start) % trajectory.slot_size == 0
            if draws and entry.probabilities:
                values[position] = math.log(max(entry.probabilities[draws[-1 if is_first else 0]], 1e-300))
    return values


def _prompts(batch: ResponseBatch) -> list[Prompt]:
    rows = zip(batch.ids, batch.input_ids.tolist(), batch.prompt_lengths.tolist(), strict=True)
    return [Prompt(token_ids=tuple(ids[:length]), id=name) for name, ids, length in rows]


def _checked_rewards(reward: Reward | Task, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """Return the rewards of responses; raise ValueError if the reward fails, hangs, or returns anything else."""
    name = f"{type(reward).__name__}.rewards"
    result: dict[str, Any] = {}

    def call() -> None:
        try:
            values = reward.rewards(examples, responses)
            if isinstance(values, Mapping):
                raise ValueError("a mapping, not a list")
            values = list(values)
            for value in values:
                if isinstance(value, str | bytes):  # float() would read numerals
                    raise ValueError(f"{value!r} is text")
                if math.isinf(value):
                    raise ValueError(f"{value} is not finite; NaN drops an answer")
            result["values"] = [float(value) for value in values]
        except BaseException as error:  # whatever ends the thread
            result["error"] = error

    # A daemon: a thread that hangs cannot be stopped, and must not keep the process alive.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(REWARD_SECONDS)
    fix = "correct the reward, then continue from the last checkpoint with --resume RUN"
    require(not thread.is_alive(), name, f"rewards within {REWARD_SECONDS:g} s", "none", fix)
    require("error" not in result, name, "rewards", result.get("error"), fix)
    values = result["values"]
    require(len(values) == len(responses), name, f"{len(responses)} numbers, one per response", len(values), fix)
    return values
