"""The decoding engine: runs any decoder on many prompts with continuous batching, prefix sharing and streaming.

:meth:`Engine.step` is the whole loop: admit, schedule, run, postprocess.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refusion_lit.engine.admission import Row, admit, rows_within
from refusion_lit.engine.batch import Batch
from refusion_lit.engine.checks import check_model, check_prompts
from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.memory import KeptCache, explain_out_of_memory, groups_within
from refusion_lit.engine.output import DecodingOutput, Generation, GenerationCallback
from refusion_lit.engine.reading import Reader
from refusion_lit.engine.requests import Forward, MoreDrafts, Read, Steps
from refusion_lit.engine.stopping import Stopping, cut_at_stop
from refusion_lit.modeling.devices import synchronised_time
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.require import require


def decode(
    model: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    callbacks: Sequence[GenerationCallback] = (),
    detokenize: Callable[..., str] | None = None,
    trace: bool = False,
    kept: KeptCache | None = None,
    checked: bool = False,
    **named: Any,  # noqa: ANN401 - fields of DecodingOptions
) -> DecodingOutput:
    """Decode prompts; each prompt gets exactly the tokens that it would get alone.

    Args:
        model: The model.
        decoder: The strategy.
        prompts: Any number of prompts of any lengths.
        sampling: Length limit and sampling options.
        named: Fields of :class:`~refusion_lit.types.DecodingOptions`: how prompts are batched; they change no token.
        callbacks: Notified when tokens are committed and prompts finish.
        detokenize: Turns the tokens of a response into text; also takes ``after``, the tokens of the prompt, and
            ``stop``, the stop strings. ``None``: generations have no text, and stop strings are refused.
        trace: Record a trace of every forward.
        kept: Keeps the cache of one call for the next call with the same model, so that its prompts share prefixes with
            those of this call.
        checked: Whether the caller has run :func:`~refusion_lit.engine.checks.check_model` and ``check_prompts``.

    Raises:
        ModelMismatchError: If the model does not fit the decoder.
        TypeError: If an option is unknown.
        ValueError: If an option is out of range, or a prompt is empty or too long.
    """
    try:
        options = DecodingOptions(**named)
    except TypeError as error:
        raise TypeError(f"{error}; options of sampling go into sampling=SamplingParams(...).") from error
    require(bool(detokenize) or not sampling.stop, "stop", "a tokenizer for stop strings", None, "pass detokenize")
    output = DecodingOutput()
    if not checked:
        output.mismatches = check_model(model, decoder, allow_mismatch=options.allow_mismatch)
        check_prompts(model, decoder, prompts, sampling, options.max_cache_tokens)
    decoder.check(sampling)
    batch_size = min(options.batch_size, max(len(prompts), 1))
    results: dict[int, Generation] = {}
    started = synchronised_time(model.device)
    groups = [(batch_size, list(enumerate(prompts)))]
    if options.max_cache_tokens is not None:
        groups = groups_within(prompts, sampling.max_new_tokens, batch_size, options.max_cache_tokens)
    for num_rows, group in groups:
        engine = Engine(
            model, decoder, num_rows, options,
            callbacks=callbacks, detokenize=detokenize, trace=trace, kept=kept, output=output,
        )  # fmt: skip
        for index, prompt in group:
            engine.submit(index, prompt, sampling)
        try:
            while engine.waiting or engine.rows:
                results |= engine.step()
        except (MemoryError, RuntimeError) as error:
            explain_out_of_memory(error, engine.cache)
            raise
        engine.close()
    output.rows = [results[i] for i in range(len(prompts))]
    output.seconds = synchronised_time(model.device) - started
    return output


@dataclass(eq=False, repr=False)
class Engine:
    """Decodes prompts that share a cache. Prompts may be submitted while it runs.

    For ``callbacks``, ``detokenize``, ``trace`` and ``kept`` see :func:`decode`.

    Attributes:
        model: The model.
        decoder: The strategy.
        num_rows: Maximum number of prompts in flight.
        options: How prompts are batched; the caller has checked that model and prompts fit.
        output: Receives the counts of calls, positions, shared tokens and memory.
    """

    model: LanguageModel
    decoder: Decoder
    num_rows: int
    options: DecodingOptions = DecodingOptions()
    _: KW_ONLY
    callbacks: Sequence[GenerationCallback] = ()
    detokenize: Callable[..., str] | None = None
    trace: bool = False
    kept: KeptCache | None = None
    output: DecodingOutput = field(default_factory=DecodingOutput)

    def __post_init__(self) -> None:
        """Start with no prompts and, if one was kept, the cache of an earlier engine."""
        model = self.model
        kept = None if self.kept is None else self.kept.take(self.decoder, self.num_rows)
        self.cache, self.held = kept or (model.make_cache(self.num_rows), {})
        self.waiting: list[Row] = []
        self.rows: list[Row] = []
        self.reader = Reader(model, all_probabilities=self.trace)
        self.run_body = model.runner()
        self.device = model.device
        self.num_sharing = self.num_rows  # prompts that share the cost of a forward; a server says how many there are

    def submit(self, index: int, prompt: Prompt, sampling: SamplingParams, *, trace: bool = False) -> None:
        """Put a prompt into the queue, under a number that :meth:`step` returns its generation by.

        With ``trace``, every forward of it is recorded; probabilities only if the engine records all traces.
        """
        self.waiting.append(Row(index, prompt, sampling, trace or self.trace))

    def abort(self, index: int) -> None:
        """Drop a prompt, waiting or in flight: its row is free from the next step on, and other prompts are unharmed.

        A number that is unknown, or of a finished prompt, changes nothing.
        """
        self.waiting = [row for row in self.waiting if row.index != index]
        self.rows = [row for row in self.rows if row.index != index]

    @torch.inference_mode()  # less work per operation than no_grad, which small models feel
    def step(self) -> dict[int, Generation]:
        """Serve prompts once; return those that are finished, by their numbers."""
        if self.waiting:
            sharing = self.decoder if self.options.share_prefixes else None
            admitted = admit(self.waiting, self.rows, self.held, self.num_rows, sharing)
            self.rows += [self._begin(*each) for each in admitted]
        for rows in self._schedule():  # schedule
            self._serve(rows)  # run body and head; postprocess: the decoder's turn
        finished = [row for row in self.rows if row.request is None]
        self.rows = [row for row in self.rows if row.request is not None]
        return {row.index: self._finish(row) for row in finished}

    def close(self) -> None:
        """Count the cache's memory, and keep the cache."""
        size = self.cache.num_bytes
        self.output.cache_bytes = max(self.output.cache_bytes, size)
        if size:
            self.output.cache_bytes_per_token = size / (self.cache.num_rows * self.cache.capacity)
        if self.kept is not None:
            self.kept.put(self.cache, self.decoder, self.held)

    def _begin(self, row: Row, num_shared: int, source: int) -> Row:
        """Create an admitted prompt's state, which takes over shared cache entries, and get its first request."""
        state = self.decoder.begin(row.prompt, row.sampling, self.model.special_tokens)
        name = f"{type(self.decoder).__name__}.begin"
        require(isinstance(state, RowState), name, "a RowState", state, "return RowState(...), say")
        state.forward_cost = self.model.forward_cost
        if num_shared:
            self.cache.copy(source, row.storage, num_shared)
            self.output.num_shared += num_shared
            state.num_shared = state.num_cached = num_shared
        state.finished = state.prefix_ends  # everything is given
        row.started = synchronised_time(self.device)
        row.waiting_since = self.output.num_calls
        steps = self._steps(state)
        if row.sampling.stop or row.sampling.min_entropy is not None:
            row.stopping = Stopping(row.sampling, self.detokenizer(row))
            steps = row.stopping.watched(steps, state)
        row.begin(state, steps)
        return row

    def _steps(self, state: RowState) -> Steps[None]:
        """Chain the decoder's steps; raise an error if a step makes no progress."""
        name = type(self.decoder).__name__
        while not state.finished:
            # A template's spans depend on all that is drawn, drafts too, and so must not depend on other prompts.
            constraint = state.prompt.constraint
            state.num_rows = self.num_sharing if constraint is None or constraint.left_to_right else 1
            num_committed = state.num_committed
            num_forwards = state.num_forwards
            steps = self.decoder.step(state)
            require(hasattr(steps, "send"), f"{name}.step", "a generator of requests", steps, "yield a Forward in it")
            yield from steps
            state.finished = state.finished or (self.decoder.stop_at_eos and state.prefix_ends)
            if state.num_committed == num_committed and not state.finished:
                bound = state.schedule_length
                expected = f"{name}.step to commit a token, or to run one of up to {bound} forwards (schedule_length)"
                fix = "commit a token in every step, set schedule_length in begin, or set finished at the end"
                require(num_forwards < state.num_forwards <= bound, "decoder", expected, state.num_forwards, fix)

    def _schedule(self) -> list[list[Row]]:
        """Return the rows that are served next, those of one call of the model together.

        Those that need no forward come first, then forwards within the budget.
        """
        drafting = [row for row in self.rows if isinstance(row.request, MoreDrafts)]
        if drafting:
            return [drafting]
        chosen = [row for row in self.rows if row.request is not None]
        if self.options.max_tokens_per_forward is not None:
            chosen = rows_within(chosen, self.options.max_tokens_per_forward)
        groups = ([row for row in chosen if row.pending.cached is cached] for cached in (True, False))
        return [group for group in groups if group]

    def _serve(self, rows: Sequence[Row]) -> None:
        """Answer the requests of rows, all forwards of one call or all further drafts, and take what they commit."""
        if isinstance(rows[0].request, Forward):
            states = self._forward(rows)
        else:
            states = torch.cat([row.hidden for row in rows]) if len(rows) > 1 else rows[0].hidden
        reads: list[list[Read]] = []
        first = 0
        for row in rows:
            reads.append(row.reads(first))
            first += len(row.hidden)
        self.reader.read(states, [read for own in reads for read in own])
        for row, own in zip(rows, reads, strict=True):
            if row.advance([read.reading for read in own]):
                for callback in self.callbacks:
                    callback.on_commit(row.index, row.state)

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the forwards of rows in one call of the model; return the hidden states that each row keeps, in order."""
        forwards = [row.pending for row in rows]
        for row, forward in zip(rows, forwards, strict=True):
            if forward.keep is not None:
                self.cache.compact(row.storage, forward.keep.indices, forward.keep.num_leading)
        cache = self.cache if forwards[0].cached else None
        batch = Batch(forwards, [row.storage for row in rows], self.device, cache)
        hidden = self.run_body(batch.ids, batch.positions, batch.visibility, cache).flatten(0, 1)
        self.output.num_calls += 1
        self.output.num_positions += len(hidden)
        sizes = [num_sequences * batch.ids.shape[1] for num_sequences, _ in batch.shapes]
        for row, own, shape, starts in zip(rows, hidden.split(sizes), batch.shapes, batch.starts, strict=True):
            row.begin_forward(own, shape, starts)
            row.waiting_since = self.output.num_calls
            self.held[row.storage] = row.prompt.token_ids
        has_twins = any(forward.twin_at is not None for forward in forwards)
        return torch.cat([row.hidden for row in rows]) if has_twins else hidden

    def detokenizer(self, row: Row) -> Callable[[list[int]], str] | None:
        """Return the function that turns the tokens of a prompt's response into text."""
        if self.detokenize is None:
            return None
        return partial(self.detokenize, after=row.prompt.token_ids, stop=row.sampling.stop)

    def _finish(self, row: Row) -> Generation:
        state = row.state
        result = row.result
        tokens = state.final_prefix()
        if row.stopping is not None and row.stopping.ends(tokens):  # even if it is given as a whole
            tokens = tokens[: row.stopping.end]
            result.finish_reason = "stop"
        elif tokens and tokens[-1] in state.special_tokens.eos_token_ids:
            result.finish_reason = "eos"
        elif len(tokens) == state.max_length:
            result.finish_reason = "length"
        else:
            name = type(self.decoder).__name__
            warnings.warn(f"prompt {result.id}: {name} left masks; the response ends before the first", stacklevel=2)
        result.token_ids = tokens
        result.num_forwards = state.num_forwards
        result.num_tokens = len(tokens) - sum(token is not None for token in state.prompt.given[: len(tokens)])
        result.seconds = synchronised_time(self.device) - row.started
        detokenize = self.detokenizer(row)
        if detokenize is not None:
            text = detokenize(tokens)
            result.text = cut_at_stop(text, row.sampling.stop) if row.sampling.stop else text
        for callback in self.callbacks:
            callback.on_finished(row.index, result)
        return result
