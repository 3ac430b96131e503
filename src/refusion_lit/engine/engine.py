"""The decoding engine: runs any decoder on many prompts with continuous batching, prefix sharing and streaming."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from refusion_lit.engine.admission import Admission, Admitted, KeptCache, groups_within
from refusion_lit.engine.checks import check_model, check_prompts
from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.executor import Executor, Row
from refusion_lit.engine.output import (
    DecodingOutput,
    Generation,
    GenerationCallback,
    TraceRound,
    cut_at_stop,
    stop_length,
)
from refusion_lit.engine.requests import Forward, MoreDrafts, Reading, Request, Steps
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.transfer import synchronised_time
from refusion_lit.types import ASSUMED_COST, ForwardCost, Prompt, SamplingParams
from refusion_lit.utils.errors import is_out_of_memory
from refusion_lit.utils.require import require, require_at_least


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
    share_prefixes: bool = True,
    max_cache_tokens: int | None = None,
    kept: KeptCache | None = None,
) -> DecodingOutput:
    """Decode prompts; each prompt gets exactly the tokens that it would get alone.

    Args:
        model: The model.
        decoder: The strategy.
        prompts: Any number of prompts of any lengths.
        sampling: Length limit and sampling options.
        max_batch_size: Maximum number of prompts decoded concurrently; a finished prompt frees its row for the next
            one (continuous batching).
        max_tokens_per_forward: Maximum number of positions a call computes, padding included. Prompts that do not fit
            wait for a later call, longest wait first; one that exceeds the limit on its own runs alone. ``None``: no
            limit. Changes no token.
        callbacks: Notified when tokens are committed and prompts finish.
        detokenize: Turns tokens into text; without it, generations have no text and stop strings are refused.
        allow_mismatch: Only warn if the model was trained for something else.
        trace: Record a trace of every forward.
        share_prefixes: Compute common prefixes of prompts (64 tokens or more) once, and copy their keys and values.
            Changes no token. Block-causal decoders share whole blocks; bidirectional decoders share nothing.
        max_cache_tokens: Maximum number of cache entries (tokens of prompts and answers) of all prompts in flight. Long
            prompts then run in separate groups with fewer rows. Storage grows in steps and may exceed what is needed by
            a quarter plus 128 entries a row. ``None``: no bound. Changes no token.
        kept: Keeps the cache of one call for the next call with the same model, so that its prompts share prefixes with
            those of this call.

    Raises:
        ModelMismatchError: If the model does not fit the decoder.
        ValueError: If an option is out of range, or a prompt is empty or too long.
    """
    require_at_least("max_batch_size", max_batch_size, 1)
    if max_tokens_per_forward is not None:
        require_at_least("max_tokens_per_forward", max_tokens_per_forward, 1)
    require(bool(detokenize) or not sampling.stop, "stop", "a tokenizer for stop strings", None, "pass detokenize")
    mismatches = check_model(model, decoder, allow_mismatch=allow_mismatch)
    check_prompts(model, decoder, prompts, sampling, max_cache_tokens)
    decoder.check(sampling)
    num_rows = min(max_batch_size, max(len(prompts), 1))
    cost = model.forward_cost(num_rows) if decoder.forward_cost == "measure" and prompts else ASSUMED_COST
    groups = groups_within(prompts, sampling.max_new_tokens, num_rows, max_cache_tokens)
    results: dict[int, Generation] = {}
    output = DecodingOutput(rows=[], num_calls=0, num_positions=0, seconds=0.0, mismatches=mismatches)
    started = synchronised_time(model.device)
    for num_rows, group in groups:
        cache, held = (None, {}) if kept is None else kept.take(decoder, num_rows)
        executor = Executor(model, num_rows, all_probabilities=trace, cache=cache)
        sharing = decoder if share_prefixes and executor.cache is not None else None
        admission = Admission(group, num_rows, sharing, held)
        run = _Run(
            model, executor, admission, decoder, sampling, cost, max_tokens_per_forward, callbacks, detokenize, trace
        )
        with _memory_errors(executor, num_rows):
            results |= run.all()
        output.num_calls += executor.num_calls
        output.num_positions += executor.num_positions
        output.num_shared += executor.num_shared
        output.cache_bytes = max(output.cache_bytes, executor.cache_bytes)
        output.cache_bytes_per_token = executor.cache_bytes_per_token or output.cache_bytes_per_token
        if kept is not None and share_prefixes and executor.cache is not None:
            kept.put(executor.cache, decoder, admission.held)
    output.rows = [results[i] for i in range(len(prompts))]
    output.seconds = synchronised_time(model.device) - started
    return output


@contextmanager
def _memory_errors(executor: Executor, num_rows: int) -> Iterator[None]:
    """Turn an out-of-memory error into a ``ValueError`` that names the options to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        used = f"{num_rows} and no memory left (the cache takes {executor.cache_bytes / 2**20:.0f} MB)"
        fix = "lower it (batch_size), or set max_cache_tokens."
        raise ValueError(f"max_batch_size: expected prompts that fit into memory, got {used}; {fix}") from error


@dataclass(slots=True, kw_only=True)
class _InFlight(Row):
    """A prompt in flight, as the engine sees it.

    Attributes:
        index: Its place among the prompts.
        state: The decoder's state.
        steps: Generator of the decoder's requests, step by step.
        result: The generation so far, with its counts.
        started: When it was admitted, in seconds.
        waiting_since: Number of the last call that it took part in.
        num_forwards_before: Its forwards up to the last commit.
        stopped_at: Tokens that remain if a stop string or a low entropy ends the response.
    """

    index: int
    state: RowState
    steps: Steps[None]
    result: Generation
    started: float
    waiting_since: int
    num_forwards_before: int = 0
    stopped_at: int | None = None


@dataclass
class _Run:
    """Decoding loop for prompts that share a cache: admit, schedule, run and postprocess until no prompt is left."""

    model: LanguageModel
    executor: Executor
    admission: Admission
    decoder: Decoder
    sampling: SamplingParams
    forward_cost: ForwardCost
    max_tokens: int | None
    callbacks: Sequence[GenerationCallback]
    detokenize: Callable[[list[int]], str] | None
    trace: bool

    def all(self) -> dict[int, Generation]:
        """Decode all prompts, filling rows as they become free; return the generations by the prompts' places."""
        rows: list[_InFlight] = []
        results: dict[int, Generation] = {}
        while self.admission or rows:
            rows += [self._admit(admitted) for admitted in self.admission.admit()]
            batch = self._schedule(rows)
            if batch:
                for row, readings in zip(batch, self.executor.run(batch), strict=True):
                    self.admission.computed(row.storage)
                    self._advance(row, readings)
            for row in [row for row in rows if row.request is None]:
                results[row.index] = self._finish(row)
                rows.remove(row)
                self.admission.release(row.storage)
        return results

    def _admit(self, admitted: Admitted) -> _InFlight:
        prompt = admitted.prompt
        state = self.decoder.begin(prompt, self.sampling, self.model.special_tokens)
        state.forward_cost = self.forward_cost
        if admitted.num_shared:
            self.executor.share(admitted.source, admitted.storage, admitted.num_shared)
            state.num_shared = admitted.num_shared
        row = _InFlight(
            storage=admitted.storage, prompt_id=prompt.id, index=admitted.index, state=state, steps=self._steps(state),
            result=Generation(id=prompt.id), started=synchronised_time(self.model.device),
            waiting_since=self.executor.num_calls,
            holes_end=len(prompt.token_ids) + prompt.given_length if prompt.num_holes else 0,
        )  # fmt: skip
        state.finished = state.prefix_ends  # everything is given
        row.request = next(row.steps, None)
        return row

    def _steps(self, state: RowState) -> Steps[None]:
        """Chain the decoder's steps; raise an error if a step makes no progress."""
        while not state.finished:
            committed, scheduled = state.num_committed, state.schedule_step
            steps = self.decoder.step(state)
            if not hasattr(steps, "send"):
                raise ValueError(
                    f"{type(self.decoder).__name__}.step: expected a generator of requests, got "
                    f"{type(steps).__name__!r}; yield a Forward in it."
                )
            yield from steps
            if state.num_committed > committed or state.finished:
                continue
            if not scheduled < state.schedule_step <= state.schedule_length:
                raise ValueError(
                    f"decoder: expected {type(self.decoder).__name__}.step to commit a token, or to advance "
                    f"schedule_step within schedule_length, got neither ({state.schedule_step} of "
                    f"{state.schedule_length}); commit a token in every step, set schedule_length in begin and advance "
                    "schedule_step up to it, or set finished at the end."
                )

    def _schedule(self, rows: Sequence[_InFlight]) -> list[_InFlight]:
        """Return the rows that are served next: first those that need no forward, then forwards within the budget."""
        drafting = [row for row in rows if isinstance(row.request, MoreDrafts)]
        if drafting:
            return drafting
        chosen = [row for row in rows if row.request is not None]
        if self.max_tokens is not None:
            chosen = self._fitting(chosen, self.max_tokens)
        for row in chosen:
            assert isinstance(row.request, Forward)
            row.waiting_since = self.executor.num_calls + 1
            row.state.num_forwards += 1
            # Shared tokens count as if they were fed: a prompt's figures do not depend on the others.
            num_shared = row.state.num_shared if row.state.num_forwards == 1 else 0
            num_rows, length = row.request.shape
            shape = (num_rows, length + num_shared)
            row.result.num_positions += sum(len(branch.tokens) for branch in row.request.branches) + num_shared
            row.result.forward_shapes.append(shape)
            if self.trace:
                row.result.trace.append(TraceRound(phase=row.request.phase, shape=shape))
        return chosen

    @staticmethod
    def _fitting(rows: Sequence[_InFlight], max_tokens: int) -> list[_InFlight]:
        """Return the row that has waited longest and those that fit with it into ``max_tokens``, padding included."""
        chosen: set[int] = set()
        sizes: dict[bool, tuple[int, int]] = {}
        for row in sorted(rows, key=lambda row: (row.waiting_since, row.state.num_forwards)):
            forward = row.request
            assert isinstance(forward, Forward)
            num_rows, length = sizes.get(forward.cached, (0, 0))
            trial = (num_rows + forward.shape[0], max(length, forward.shape[1]))
            if trial[0] * trial[1] <= max_tokens or not chosen:
                chosen.add(row.index)
                sizes[forward.cached] = trial
        return [row for row in rows if row.index in chosen]

    def _advance(self, row: _InFlight, readings: list[Reading]) -> None:
        """Hand a row its readings, take its next request, and look at what it committed."""
        state, request, num_before = row.state, row.request, row.state.num_committed
        try:
            row.request = row.steps.send(readings)
        except StopIteration:
            row.request = None
        committed = sorted(state.committed[num_before:])
        if self.trace and request is not None:
            _record(row, request, readings, committed)
        if not committed:
            return
        row.result.round_ratios.append(len(committed) / max(state.num_forwards - row.num_forwards_before, 1))
        row.num_forwards_before = state.num_forwards
        for callback in self.callbacks:
            callback.on_commit(row.index, state)
        if self.sampling.stop or self.sampling.min_entropy is not None:
            row.stopped_at = stop_length(state.final_prefix(), self.sampling, self.detokenize)
            if row.stopped_at is not None:
                row.steps.close()
                row.request = None

    def _finish(self, row: _InFlight) -> Generation:
        state, result = row.state, row.result
        tokens = state.final_prefix()
        if row.stopped_at is not None:
            tokens, result.finish_reason = tokens[: row.stopped_at], "stop"
        elif tokens and tokens[-1] in state.special_tokens.eos_token_ids:
            result.finish_reason = "eos"
        elif len(tokens) == state.max_length:
            result.finish_reason = "length"
        else:
            warnings.warn(f"prompt {row.prompt_id}: {type(self.decoder).__name__} left masked places", stacklevel=2)
        result.token_ids, result.num_forwards = tokens, state.num_forwards
        result.num_given = sum(token is not None for token in state.prompt.given[: len(tokens)])
        result.seconds = synchronised_time(self.model.device) - row.started
        if self.detokenize is not None:
            result.text = cut_at_stop(self.detokenize(tokens), self.sampling.stop)
        for callback in self.callbacks:
            callback.on_finished(row.index, result)
        return result


def _record(row: _InFlight, request: Request, readings: list[Reading], committed: list[int]) -> None:
    """Add a request's readings to the trace of the row's last forward."""
    entry, start = row.result.trace[-1], row.state.prompt_length
    assert row.forward is not None
    branches = row.forward.branches
    offsets = request.draft_at if isinstance(request, MoreDrafts) else [branch.draft_at for branch in branches]
    for branch, at, reading in zip(branches, offsets, readings, strict=True):
        entry.positions += [branch.positions[offset] + branch.shift for offset in at]
        entry.tokens += reading.tokens
        entry.probabilities += reading.probabilities
        entry.scores += reading.scores
    entry.accepted += [start + place for place in committed]
