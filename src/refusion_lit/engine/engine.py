"""The decoding engine: runs any decoder on many prompts with continuous batching, prefix sharing and streaming.

:meth:`Engine.step` is one iteration of the loop: admit, schedule, run, postprocess.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from refusion_lit.engine.batch import Batch
from refusion_lit.engine.checks import check_model, check_prompts, read_decoding_options
from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.kept_cache import KeptCache
from refusion_lit.engine.logprobs import LogprobRecorder
from refusion_lit.engine.output import DecodingOutput, Generation, GenerationCallback
from refusion_lit.engine.requests import MoreDrafts, SamplingJob, Steps
from refusion_lit.engine.sampler import Sampler
from refusion_lit.engine.scheduler import admit, fit_into_forward, group_by_cache_size
from refusion_lit.engine.sequence import PromptSequence
from refusion_lit.engine.stopping import StopFinder, cut_at_stop
from refusion_lit.modeling.devices import is_out_of_memory, synchronised_time
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams
from refusion_lit.utils.require import require, require_at_least


def decode(
    model: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    callbacks: Sequence[GenerationCallback] = (),
    detokenize: Callable[..., str] | None = None,
    trace: bool = False,
    num_top_logprobs: int | None = None,
    kept: KeptCache | None = None,
    checked: bool = False,
    **named: Any,  # noqa: ANN401 - fields of DecodingOptions
) -> DecodingOutput:
    """Decode prompts; every prompt gets exactly the tokens that it would get alone.

    Examples:
        >>> import refusion_lit
        >>> from refusion_lit.decoding import ReFusion
        >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
        >>> queries = ["12+34,56+78>", "31+22,40+15>"]
        >>> prompts = [Prompt(token_ids=tuple(model.encode(query)), id=query) for query in queries]
        >>> output = decode(model.backbone, ReFusion(slot_size=4), prompts, SamplingParams(max_new_tokens=24),
        ...                 detokenize=model.detokenize, batch_size=2)
        >>> [(row.text, row.num_forwards) for row in output.rows]
        [('12+34=46;56+78=134;', 3), ('31+22=53;40+15=55;', 3)]

    Args:
        model: The model.
        decoder: The strategy.
        prompts: Any number of prompts of any lengths.
        sampling: Length limit and sampling options.
        named: Fields of :class:`~refusion_lit.types.DecodingOptions`, which determine batching and change no token.
        callbacks: Notified when tokens are committed and prompts finish.
        detokenize: Turns a response's tokens into text; also takes ``after``, the prompt's tokens, and
            ``stop``, the stop strings. ``None``: generations have no text, and stop strings are refused.
        trace: Record every forward.
        num_top_logprobs: Record the tokens' log-probabilities, and at their places this number of most probable tokens,
            at least 0. ``None``: record none.
        kept: Keeps the cache for the next call with the same model; its prompts then share prefixes with this call's
            prompts.
        checked: Whether the caller has run :func:`~refusion_lit.engine.checks.check_model` and ``check_prompts``.

    Raises:
        ModelMismatchError: If the model does not fit the decoder.
        TypeError: If an option is unknown.
        ValueError: If an option is out of range, or a prompt is empty or too long.
    """
    options = read_decoding_options(named, decode)
    if num_top_logprobs is not None:
        require_at_least("num_top_logprobs", num_top_logprobs, 0)
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
        groups = group_by_cache_size(prompts, sampling.max_new_tokens, batch_size, options.max_cache_tokens)
    for num_rows, group in groups:
        engine = Engine(
            model, decoder, num_rows, options,
            callbacks=callbacks, detokenize=detokenize, trace=trace, kept=kept, output=output,
        )  # fmt: skip
        for index, prompt in group:
            engine.submit(index, prompt, sampling, num_top_logprobs=num_top_logprobs)
        try:
            while engine.waiting or engine.running:
                results |= engine.step()
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise _out_of_memory_error(engine.cache) from error
            raise
        engine.close()
    output.rows = [results[i] for i in range(len(prompts))]
    output.seconds = synchronised_time(model.device) - started
    return output


def _out_of_memory_error(cache: KVCache) -> ValueError:
    """Return an error that names the option to change."""
    used = f"{cache.num_rows} and no memory left (the cache takes {cache.num_bytes / 2**20:.0f} MB)"
    fix = "lower it, or set max_cache_tokens."
    return ValueError(f"batch_size: expected prompts that fit into memory, got {used}; {fix}")


@dataclass(eq=False, repr=False)
class Engine:
    """Decodes prompts that share a cache. Prompts may be submitted while the engine runs.

    >>> import refusion_lit
    >>> from refusion_lit.decoding import ReFusion
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> engine = Engine(model.backbone, ReFusion(slot_size=4), num_rows=2, detokenize=model.detokenize)
    >>> prompt = Prompt(token_ids=tuple(model.encode("12+34,56+78>")), id="0")
    >>> engine.submit(0, prompt, SamplingParams(max_new_tokens=24))
    >>> results = {}
    >>> while engine.waiting or engine.running:
    ...     results |= engine.step()
    >>> results[0].text
    '12+34=46;56+78=134;'

    For ``callbacks``, ``detokenize``, ``trace`` and ``kept`` see :func:`decode`.

    Attributes:
        model: The model.
        decoder: The strategy.
        num_rows: Maximum number of prompts in flight.
        options: Options for batching. The caller has checked that model and prompts fit.
        output: Counts calls, positions, shared tokens and memory.
        waiting: Submitted prompts without a cache row.
        running: Prompts in flight.
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
        """Start without prompts, with an earlier engine's cache if that was kept."""
        model = self.model
        kept = None if self.kept is None else self.kept.take(self.decoder, self.num_rows)
        self.cache, self.cached_prompts = kept or (model.make_cache(self.num_rows), {})
        self.waiting: list[PromptSequence] = []
        self.running: list[PromptSequence] = []
        self.sampler = Sampler(model, all_probabilities=self.trace)
        self.run_body = model.runner()
        self.run_drafter = model.draft_runner()
        self.device = model.device
        self.num_sharing = self.num_rows  # prompts that share a forward's cost; a server updates the number

    @cached_property
    def run_canvas(self) -> Callable[..., Tensor]:
        """The model's forward pass over canvases, made on first use, because most decoders feed none."""
        return self.model.canvas_runner()

    def submit(
        self,
        index: int,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        trace: bool = False,
        num_top_logprobs: int | None = None,
    ) -> None:
        """Put a prompt into the queue.

        Args:
            index: Number under which :meth:`step` returns the prompt's generation.
            prompt: The prompt.
            sampling: Length limit and sampling options.
            trace: Record the prompt's forwards; with probabilities only if the engine records all traces.
            num_top_logprobs: Record log-probabilities, see :func:`decode`.
        """
        logprobs = None if num_top_logprobs is None else LogprobRecorder(num_top_logprobs)
        self.waiting.append(PromptSequence(index, prompt, sampling, trace or self.trace, logprobs))

    def abort(self, index: int) -> None:
        """Drop a prompt, waiting or in flight. Its row is free from the next step on; other prompts go on.

        An unknown or finished prompt's number changes nothing.
        """
        self.waiting = [sequence for sequence in self.waiting if sequence.index != index]
        self.running = [sequence for sequence in self.running if sequence.index != index]

    @torch.inference_mode()  # less work per operation than no_grad: small models get faster
    def step(self) -> dict[int, Generation]:
        """Run one iteration; return the finished generations by prompt number."""
        decoder = self.decoder if self.options.share_prefixes else None
        admitted = admit(self.waiting, self.running, self.cached_prompts, self.num_rows, decoder)
        self.running += [self._begin(*admission) for admission in admitted]
        for group in self._schedule():
            self._postprocess(group, self._run(group))
        finished = [sequence for sequence in self.running if sequence.request is None]
        self.running = [sequence for sequence in self.running if sequence.request is not None]
        return {sequence.index: self._finish(sequence) for sequence in finished}

    def close(self) -> None:
        """Count the cache's memory, and keep the cache."""
        size = self.cache.num_bytes
        self.output.cache_bytes = max(self.output.cache_bytes, size)
        if size:
            self.output.cache_bytes_per_token = size / (self.cache.num_rows * self.cache.capacity)
        if self.kept is not None:
            self.kept.put(self.cache, self.decoder, self.cached_prompts)

    def _begin(self, sequence: PromptSequence, num_shared: int, source: int) -> PromptSequence:
        """Create an admitted prompt's state, copy shared cache entries, and get the first request."""
        state = self.decoder.begin(sequence.prompt, sequence.sampling, self.model.special_tokens)
        name = f"{type(self.decoder).__name__}.begin"
        require(isinstance(state, RowState), name, "a RowState", state, "return RowState(...), say")
        state.forward_cost = self.model.forward_cost
        if num_shared:
            self.cache.copy(source, sequence.cache_row, num_shared)
            self.output.num_shared += num_shared
            state.num_shared = state.num_cached = num_shared
        state.finished = state.prefix_ends  # everything is given
        sequence.started = synchronised_time(self.device)
        sequence.last_call = self.output.num_calls
        steps = self._steps(state)
        if sequence.sampling.stop:
            sequence.stop_finder = StopFinder(sequence.sampling.stop, partial(self._detokenize, sequence))
            steps = sequence.stop_finder.watch(steps, state)
        sequence.begin(state, steps)
        return sequence

    def _steps(self, state: RowState) -> Steps[None]:
        """Chain the decoder's steps; raise an error if a step makes no progress."""
        name = type(self.decoder).__name__
        while not state.finished:
            # A template's spans depend on all drawn tokens, drafts too, and so must not depend on other prompts.
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

    def _schedule(self) -> list[list[PromptSequence]]:
        """Return the groups to serve next; a group's prompts share a call of the model.

        The order is: requests for further drafts, which need no call; then a drafter's forwards, so that the model
        verifies many prompts' drafts together; then forwards within the budget.
        """
        drafting = [sequence for sequence in self.running if isinstance(sequence.request, MoreDrafts)]
        if drafting:
            return [drafting]
        chosen = [sequence for sequence in self.running if sequence.request is not None]
        chosen = [sequence for sequence in chosen if sequence.forward.by_drafter] or chosen
        if self.options.max_tokens_per_forward is not None:
            chosen = fit_into_forward(chosen, self.options.max_tokens_per_forward)
        groups: dict[tuple[bool, bool], list[PromptSequence]] = {}
        for sequence in chosen:
            groups.setdefault(sequence.forward.kind, []).append(sequence)
        return [groups[kind] for kind in sorted(groups, reverse=True)]

    def _run(self, group: Sequence[PromptSequence]) -> Tensor:
        """Run a group's forwards in one call; return all prompts' hidden states, in order.

        For further drafts, return the last forward's hidden states.
        """
        if isinstance(group[0].request, MoreDrafts):
            self._count_shape(group, num_positions=0, cache_length=0)
            return torch.cat([sequence.hidden for sequence in group]) if len(group) > 1 else group[0].hidden
        forwards = [sequence.forward for sequence in group]
        for sequence, forward in zip(group, forwards, strict=True):
            if forward.keep is not None:
                self.cache.compact(sequence.cache_row, forward.keep.indices, forward.keep.num_leading)
        cache = self.cache if forwards[0].cached else None
        batch = Batch(forwards, [sequence.cache_row for sequence in group], self.device, cache)
        first = forwards[0]
        inputs = batch.ids, batch.positions, batch.visibility, cache
        if first.canvas:
            hidden = self.run_canvas(*inputs, signal=batch.signal)
        else:
            run = self.run_drafter if first.by_drafter else self.run_body
            assert run is not None, "a decoder that requests a drafter's forwards requires a drafter"
            hidden = run(*inputs)
        hidden = hidden.flatten(0, 1)
        if not first.by_drafter:
            self.output.num_calls += 1
            self.output.num_positions += len(hidden)
            self._count_shape(group, num_positions=batch.num_tokens, cache_length=batch.num_keys)
        parts = hidden.split_with_sizes([num_rows * batch.ids.shape[1] for num_rows, _ in batch.shapes])
        for sequence, part, shape, starts in zip(group, parts, batch.shapes, batch.starts, strict=True):
            sequence.record_forward(part, shape, starts)
            sequence.last_call = self.output.num_calls
            self.cached_prompts[sequence.cache_row] = sequence.prompt.token_ids
        has_twins = any(forward.twin_at is not None for forward in forwards)
        return torch.cat([sequence.hidden for sequence in group]) if has_twins else hidden

    def _count_shape(self, group: Sequence[PromptSequence], *, num_positions: int, cache_length: int) -> None:
        """Count a call's shape, including the logits that :class:`Sampler` computes for the pending requests."""
        num_logits = 0
        for sequence in group:
            assert sequence.request is not None
            num_read = sum(len(branch.draft_at) + len(branch.score_at) for branch in sequence.branches)
            num_logits += num_read if sequence.request.draw.guidance is None else 2 * num_read
        self.output.call_shapes.add(
            num_sequences=len(group), num_positions=num_positions, num_logits=num_logits, cache_length=cache_length
        )

    def _postprocess(self, group: Sequence[PromptSequence], hidden: Tensor) -> None:
        """Sample from the hidden states, and let every prompt's decoder commit tokens and make its next request."""
        jobs: list[list[SamplingJob]] = []
        first = 0
        for sequence in group:
            jobs.append(sequence.sampling_jobs(first))
            first += len(sequence.hidden)
        self.sampler.sample(hidden, [job for sequence_jobs in jobs for job in sequence_jobs])
        for sequence, sequence_jobs in zip(group, jobs, strict=True):
            if sequence.advance([job.reading for job in sequence_jobs]):
                for callback in self.callbacks:
                    callback.on_commit(sequence.index, sequence.state)

    def _finish(self, sequence: PromptSequence) -> Generation:
        """Return a finished prompt's generation, and notify the callbacks."""
        state = sequence.state
        result = sequence.result
        tokens = state.final_prefix()
        stop_finder = sequence.stop_finder
        if stop_finder is not None and stop_finder.find(tokens):  # even if it is given as a whole
            tokens = tokens[: stop_finder.end]
            result.finish_reason = "stop"
        elif tokens and tokens[-1] in state.special_tokens.eos_token_ids:
            result.finish_reason = "eos"
        elif len(tokens) == state.max_length:
            result.finish_reason = "length"
        else:
            name = type(self.decoder).__name__
            warnings.warn(f"prompt {result.id}: {name} left masks; the response ends before the first", stacklevel=2)
        result.token_ids = tokens
        if sequence.logprobs is not None:
            result.logprobs = sequence.logprobs.of_response(tokens)
        result.num_forwards = state.num_forwards
        result.num_tokens = len(tokens) - sum(token is not None for token in state.prompt.given[: len(tokens)])
        result.seconds = synchronised_time(self.device) - sequence.started
        if self.detokenize is not None:
            result.text = cut_at_stop(self._detokenize(sequence, tokens), sequence.sampling.stop)
        for callback in self.callbacks:
            callback.on_finished(sequence.index, result)
        return result

    def _detokenize(self, sequence: PromptSequence, tokens: list[int]) -> str:
        """Return response tokens as text that continues the prompt."""
        assert self.detokenize is not None  # decode and the server refuse stop strings without it
        return self.detokenize(tokens, after=sequence.prompt.token_ids, stop=sequence.sampling.stop)
