"""The engine: owns the loop, batches, counts, cuts, streams and traces, for every decoder alike."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refusion_lit.decoding.base import Decoder, RowState
from refusion_lit.decoding.executor import Executor
from refusion_lit.decoding.output import DecodingOutput, GenerationCallback, RowOutput, TraceRound
from refusion_lit.decoding.requests import Branch, Forward, MoreDrafts, Reading, Request
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt, SamplingParams


class ModelMismatchError(ValueError):
    """A decoder was asked to run on a model that was trained otherwise."""


@dataclass
class _Running:
    """A prompt being decoded."""

    index: int
    row: int
    state: RowState
    steps: Any
    started: float
    request: Request | None = None
    num_positions: int = 0
    shapes: list[tuple[int, int]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    traced: Sequence[Branch] = ()
    ratios: list[float] = field(default_factory=list)
    num_forwards_before: int = 0
    stopped_at: int | None = None
    waits_since: int = 0


def check_model(model: LanguageModel, decoder: Decoder, *, allow_mismatch: bool = False) -> list[str]:
    """Refuse a model that a decoder cannot run on or was not trained for.

    Args:
        model: The model.
        decoder: The decoder.
        allow_mismatch: Warn instead, where the model was trained otherwise.

    Returns:
        The reasons, if allowed.

    Raises:
        ModelMismatchError: With the reasons.
    """
    name = type(decoder).__name__
    needs = decoder.requirements()
    if needs.mask_token and model.special_tokens.mask_token_id is None:
        raise ModelMismatchError(
            f"{name} needs a mask token, and the model's tokenizer has none; add one and train it."
        )
    reasons = needs.mismatches(model.traits)
    if not reasons:
        return []
    message = f"{name} does not fit this model: {'; '.join(reasons)}."
    if not allow_mismatch:
        raise ModelMismatchError(f"{message} Set allow_mismatch: true to run it all the same.")
    warnings.warn(message, stacklevel=2)
    return reasons


@torch.no_grad()
def decode(
    model: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    max_batch_size: int = 1,
    max_tokens_per_forward: int | None = None,
    callbacks: Sequence[GenerationCallback] = (),
    detokenize: Callable[[list[int]], str] | None = None,
    allow_mismatch: bool = False,
    trace: bool = False,
) -> DecodingOutput:
    """Decode prompts; each gets exactly the tokens that it gets alone.

    Args:
        model: The model.
        decoder: The strategy.
        prompts: Any number of prompts of any lengths.
        sampling: How much to generate and how.
        max_batch_size: At most so many prompts share a forward; a finished one makes room for the next.
        max_tokens_per_forward: At most so many positions, padding included, are computed in a call. Prompts that do
            not fit wait for the next one, those first that have waited longest; one that is too large by itself
            runs alone. ``None`` for no bound. Changes no token.
        callbacks: Told of tokens as they become final.
        detokenize: Turns tokens into text; needed for stop strings.
        allow_mismatch: Only warn where the model was trained for something else.
        trace: Record a trace of every forward.

    Raises:
        ModelMismatchError: If the model does not fit the decoder.
        ValueError: If an option is impossible.
    """
    if max_batch_size < 1:
        raise ValueError(
            f"max_batch_size: expected an integer of at least 1, got {max_batch_size}; set it to 1 or more."
        )
    if max_tokens_per_forward is not None and max_tokens_per_forward < 1:
        raise ValueError(
            f"max_tokens_per_forward: expected an integer of at least 1, or null, got {max_tokens_per_forward}; set it "
            "to 1 or more."
        )
    if sampling.stop and detokenize is None:
        raise ValueError("stop: stop strings need a tokenizer, got none; pass detokenize.")
    mismatches = check_model(model, decoder, allow_mismatch=allow_mismatch)
    decoder.check(sampling)
    num_rows = min(max_batch_size, max(len(prompts), 1))
    run = _Run(model, decoder, sampling, num_rows, max_tokens_per_forward, callbacks, detokenize, trace)
    began = _now(model)
    rows = run.all(prompts)
    return DecodingOutput(
        rows=rows,
        num_calls=run.executor.num_calls,
        num_positions=run.executor.num_positions,
        seconds=_now(model) - began,
        mismatches=mismatches,
    )


class _Run:
    """One call of :func:`decode`."""

    def __init__(
        self,
        model: LanguageModel,
        decoder: Decoder,
        sampling: SamplingParams,
        num_rows: int,
        max_tokens: int | None,
        callbacks: Sequence[GenerationCallback],
        detokenize: Callable[[list[int]], str] | None,
        trace: bool,
    ) -> None:
        self.model, self.decoder, self.sampling = model, decoder, sampling
        self.callbacks, self.detokenize, self.trace = callbacks, detokenize, trace
        self.executor = Executor(model, num_rows, all_probabilities=trace)
        self.free = list(range(num_rows))
        self.max_tokens = max_tokens
        self.num_rounds = 0

    def all(self, prompts: Sequence[Prompt]) -> list[RowOutput]:
        """Decode everything, filling rows as they become free."""
        waiting = deque(enumerate(prompts))
        running: list[_Running] = []
        outputs: dict[int, RowOutput] = {}
        while waiting or running:
            while waiting and self.free:
                running.append(self._admit(*waiting.popleft()))
            self._read_more(running)
            live = [row for row in running if row.request is not None]
            if live:
                self._forward(live if self.max_tokens is None else self._fitting(live, self.max_tokens))
            still: list[_Running] = []
            for row in running:
                if row.request is None:
                    outputs[row.index] = self._finish(row)
                else:
                    still.append(row)
            running = still
        return [outputs[i] for i in range(len(prompts))]

    def _admit(self, index: int, prompt: Prompt) -> _Running:
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.id}: expected at least one token, got none; give it some text.")
        state = self.decoder.begin(prompt, self.sampling, self.model.special_tokens)
        row = self.free.pop(0)
        running = _Running(index, row, state, self._steps(state), started=_now(self.model), waits_since=self.num_rounds)
        running.request = next(running.steps, None)
        return running

    def _steps(self, state: RowState) -> Any:  # noqa: ANN401 - a generator like a decoder's step
        """Chain a row's steps, holding each to its promise of progress."""
        while not state.finished:
            committed, scheduled = state.num_committed, state.schedule_step
            yield from self.decoder.step(state)
            if state.num_committed > committed or state.finished:
                continue
            if not scheduled < state.schedule_step <= state.schedule_length:
                raise RuntimeError(
                    f"{type(self.decoder).__name__}.step neither committed a token nor advanced its schedule "
                    f"({state.schedule_step} of {state.schedule_length})"
                )

    def _read_more(self, running: list[_Running]) -> None:
        """Serve reads of hidden states that exist already, until every row wants a forward or is done."""
        while True:
            asking = [row for row in running if isinstance(row.request, MoreDrafts)]
            if not asking:
                return
            readings = self.executor.more([(r.row, r.state.prompt.id, r.request) for r in asking])  # type: ignore[misc]
            for row, reading in zip(asking, readings, strict=True):
                self._advance(row, reading)

    @staticmethod
    def _fitting(live: list[_Running], max_tokens: int) -> list[_Running]:
        """Return rows whose calls keep within the budget: the one that has waited longest, and what fits beside it.

        Rows of other lengths would be padded, so that those of similar lengths fit best.
        """
        chosen: set[int] = set()
        sizes: dict[bool, tuple[int, int]] = {}
        for row in sorted(live, key=lambda row: (row.waits_since, row.state.num_forwards)):
            forward = row.request
            assert isinstance(forward, Forward)
            num_rows, length = sizes.get(forward.cached, (0, 0))
            trial = (num_rows + forward.shape[0], max(length, forward.shape[1]))
            if trial[0] * trial[1] <= max_tokens or not chosen:
                chosen.add(row.row)
                sizes[forward.cached] = trial
        return [row for row in live if row.row in chosen]

    def _forward(self, live: list[_Running]) -> None:
        self.num_rounds += 1
        forwards: list[tuple[int, str, Forward]] = []
        for row in live:
            forward = row.request
            assert isinstance(forward, Forward)
            forwards.append((row.row, row.state.prompt.id, forward))
            row.state.num_forwards += 1
            row.waits_since = self.num_rounds
            shape = forward.shape
            row.num_positions += sum(len(branch.tokens) for branch in forward.branches)
            row.shapes.append(shape)
            if self.trace:
                row.trace.append({"phase": forward.phase, "shape": shape})
        for row, readings in zip(live, self.executor.forward(forwards), strict=True):
            self._advance(row, readings)

    def _advance(self, row: _Running, readings: list[Reading]) -> None:
        """Hand a row its readings and take its next request; ``None`` when it is done."""
        state = row.state
        request = row.request
        assert request is not None
        num_before = state.num_committed
        try:
            row.request = row.steps.send(readings)
        except StopIteration:
            row.request = None
        new = sorted(state.committed[num_before:])
        if self.trace:
            _record(row, request, readings, new)
        if not new:
            return
        row.ratios.append(len(new) / max(state.num_forwards - row.num_forwards_before, 1))
        row.num_forwards_before = state.num_forwards
        for callback in self.callbacks:
            callback.on_commit(row.index, state)
        if self.sampling.stop:
            row.stopped_at = self._stop_length(state)
            if row.stopped_at is not None:
                row.steps.close()
                row.request = None

    def _stop_length(self, state: RowState) -> int | None:
        """Return how many tokens of the final left part it takes to show a stop string, if it shows one."""
        assert self.detokenize is not None
        prefix = state.final_prefix()

        def shows(length: int) -> bool:
            text = self.detokenize(prefix[:length])  # type: ignore[misc]
            return any(stop in text for stop in self.sampling.stop)

        if not shows(len(prefix)):
            return None
        return next(length for length in range(1, len(prefix) + 1) if shows(length))

    def _finish(self, row: _Running) -> RowOutput:
        state = row.state
        tokens = state.final_prefix()
        if row.stopped_at is not None:
            tokens, reason = tokens[: row.stopped_at], "stop"
        elif tokens and tokens[-1] in state.special_tokens.eos_token_ids:
            reason = "eos"
        elif len(tokens) == state.sampling.max_new_tokens:
            reason = "length"
        else:
            reason = "unfinished"
            warnings.warn(f"prompt {state.prompt.id}: {type(self.decoder).__name__} left masked places", stacklevel=2)
        output = RowOutput(
            id=state.prompt.id,
            token_ids=tokens,
            finish_reason=reason,
            num_forwards=state.num_forwards,
            num_positions=row.num_positions,
            seconds=_now(self.model) - row.started,
            round_ratios=row.ratios,
            forward_shapes=row.shapes,
            trace=[TraceRound(**values) for values in row.trace],
        )
        self.executor.release(row.row)
        self.free.append(row.row)
        self.free.sort()
        for callback in self.callbacks:
            callback.on_finished(row.index, output)
        return output


def _record(row: _Running, request: Request, readings: list[Reading], accepted: list[int]) -> None:
    entry = row.trace[-1]
    start = row.state.prompt_length
    if isinstance(request, Forward):
        places = [[b.positions[o] + request.draw.shift for o in b.draft_at] for b in request.branches]
        row.traced = request.branches
    else:
        pairs = zip(row.traced, request.draft_at, strict=True)
        places = [[b.positions[o] + request.draw.shift for o in at] for b, at in pairs]
    for name, values in (
        ("positions", [p for at in places for p in at]),
        ("tokens", [t for r in readings for t in r.tokens]),
        ("probabilities", [p for r in readings for p in r.probabilities]),
        ("scores", [s for r in readings for s in r.scores]),
        ("accepted", [start + place for place in accepted]),
    ):
        entry.setdefault(name, []).extend(values)


def _now(model: LanguageModel) -> float:
    """Read a clock that has waited for the device."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
