"""Submitted prompts: the queue that gives them rows of the cache, prompts in flight, and which of them go next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from refusion_lit.engine.batch import shape_of
from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.memory import MIN_SHARED, Tokens, prefix_of
from refusion_lit.engine.output import Generation, TraceRound
from refusion_lit.engine.requests import Branch, Forward, MoreDrafts, Read, Reading, Request, Steps
from refusion_lit.engine.stopping import Stopping
from refusion_lit.types import ConstraintState, Prompt, SamplingParams
from refusion_lit.utils.require import require

_FIX = "see docs/extending.md"


@dataclass(slots=True, eq=False, repr=False)
class Row:
    """A submitted prompt; it waits for a row of the cache, is in flight, and ends.

    Attributes:
        index: Its number among the submitted prompts.
        prompt: The prompt.
        sampling: Length limit and sampling options.
        trace: Whether every forward is recorded.
        storage: Its row of the cache; -1 while it waits.
        started: When it was admitted, in seconds.
        waiting_since: Number of the last call that it took part in.
        state: The decoder's state. It and what follows are set by :meth:`begin`.
        steps: The decoder's generator of requests.
        request: Its pending request to the model; ``None`` once it is finished.
        result: The generation so far, with its counts.
        constraint: Which tokens may be drawn; ``None``: all.
        stopping: Finds stop strings and a low entropy; ``None`` if the sampling options name neither.
        branches: What the pending request reads: the last forward's branches, with other offsets for further drafts.
        hidden: Hidden states of that forward [position, hidden], padding included, for further reads; if they are
            guided by an earlier forward, then the states that were kept of that one.
        starts: First position of each branch among them; then, with an earlier forward, that of its guidance.
    """

    index: int
    prompt: Prompt
    sampling: SamplingParams
    trace: bool = False
    storage: int = -1
    started: float = 0.0
    waiting_since: int = 0
    state: RowState = field(init=False)
    steps: Steps[None] = field(init=False)
    request: Request | None = field(init=False)
    result: Generation = field(init=False)
    constraint: ConstraintState | None = field(init=False)
    stopping: Stopping | None = None
    branches: Sequence[Branch] = ()
    hidden: Tensor = field(init=False)
    starts: Sequence[int] = ()

    def begin(self, state: RowState, steps: Steps[None]) -> None:
        """Go into flight: run the decoder up to its first request."""
        prompt = self.prompt
        self.state = state
        self.steps = steps
        self.request = self._next(None)
        self.result = Generation(id=prompt.id)
        self.constraint = None if prompt.constraint is None else prompt.constraint.begin(state.max_length)

    @property
    def pending(self) -> Forward:
        """The pending request, which must be a forward."""
        assert isinstance(self.request, Forward)
        return self.request

    def begin_forward(self, hidden: Tensor, shape: tuple[int, int], starts: Sequence[int]) -> None:
        """Take the hidden states of the pending forward, its shape and the start of each branch, and count it.

        Shared tokens count as if they were fed: a prompt's figures do not depend on other prompts.
        """
        forward = self.pending
        self.starts = starts
        if forward.twin_at is not None:
            self.starts = [*starts, len(hidden) + forward.twin_at]
            hidden = torch.cat((hidden, self.hidden))
        self.hidden = hidden
        self.state.num_forwards += 1
        num_shared = self.state.num_shared if self.state.num_forwards == 1 else 0
        shape = (shape[0], shape[1] + num_shared)
        self.result.num_positions += sum(len(branch.tokens) for branch in forward.branches) + num_shared
        self.result.forward_shapes.append(shape)
        if self.trace:
            self.result.trace.append(TraceRound(phase=forward.phase, shape=shape))

    def reads(self, first: int) -> list[Read]:
        """Return what the pending request reads from each branch of the last forward.

        Args:
            first: Index of that forward's first hidden state among those of all rows.
        """
        assert self.request is not None
        draw = self.request.draw
        guide = 0 if draw.guidance is None else self.starts[1]  # the first branch, at 0, is guided
        return [
            Read(draw, branch, first + start, self.prompt, self.state.tokens, self.constraint, guide)
            for branch, start in zip(self.branches, self.starts, strict=False)
        ]

    def advance(self, readings: list[Reading]) -> bool:
        """Send the decoder its readings and take its next request; return whether it has committed tokens."""
        state = self.state
        branches = self.branches
        num_before = state.num_committed
        self.request = self._next(readings)
        committed = sorted(state.committed[num_before:])
        if self.trace:
            self.result.trace[-1].add(branches, readings, [state.prompt_length + place for place in committed])
        if committed:
            last_commit = state.commit_rounds[state.committed[num_before - 1]] if num_before else 0
            self.result.round_ratios.append(len(committed) / max(state.num_forwards - last_commit, 1))
        return bool(committed)

    def _next(self, readings: list[Reading] | None) -> Request | None:
        """Send the decoder its readings, at first none, and return its next request; ``None`` at its end.

        Raises:
            ValueError: If it yields something else, or asks beyond a branch, where another prompt's states may be.
        """
        try:
            request = self.steps.send(readings)  # pyright: ignore[reportArgumentType] - None starts a generator
        except StopIteration:
            return None
        if isinstance(request, MoreDrafts) and len(request.draft_at) == len(self.branches):
            pairs = zip(self.branches, request.draft_at, strict=True)
            branches = [replace(branch, draft_at=offsets, score_at=()) for branch, offsets in pairs]
        else:
            branches = request.branches if isinstance(request, Forward) else ()
        expected = "steps that yield a Forward with branches, or MoreDrafts for each branch of the last Forward"
        require(bool(branches), "decoder", expected, request, _FIX)
        for branch in branches:
            offsets = [0, *branch.draft_at, *(offset for offset, _ in branch.score_at)]
            num = len(branch.tokens)
            is_whole = num == len(branch.positions) and min(branch.positions, default=0) >= 0
            if not (is_whole and 0 <= min(offsets) <= max(offsets) < num):
                expected = "branches with tokens, a position from 0 for each, and draft_at and score_at among them"
                got = f"{num} tokens at {branch.positions!r:.99} and offsets {offsets[1:]!r:.99}"
                raise ValueError(f"decoder: expected {expected}, got {got}; {_FIX}.")
        self.branches = branches
        return request


def admit(
    waiting: list[Row], rows: Sequence[Row], held: dict[int, Tokens], num_rows: int, decoder: Decoder | None
) -> Iterator[tuple[Row, int, int]]:
    """Assign free rows of the cache to waiting prompts.

    Later prompts may go before a prompt that waits for a prefix, see :func:`~refusion_lit.engine.memory.prefix_of`; at
    most ``num_rows`` prompts are held back.

    Args:
        waiting: Prompts without a row, in their order; those that get one are removed.
        rows: Prompts in flight.
        held: Prompts whose entries are computed, by row. Entries of a finished prompt stay until its row is reused.
        num_rows: Rows of the cache.
        decoder: Determines how much of a common prefix may be shared; ``None``: nothing is shared.

    Yields:
        A prompt, the number of its first entries that are copied, and the row of the cache that they are copied from,
        possibly its own; -1 if nothing is shared.
    """
    free = {*range(num_rows)} - {row.storage for row in rows}
    pending = {row.storage: row.prompt.token_ids for row in rows if row.storage not in held}
    delayed: list[Row] = []
    while waiting and free and len(delayed) < num_rows:
        row = waiting.pop(0)
        tokens = row.prompt.token_ids
        prefix = (0, -1)
        if decoder is not None and len(tokens) >= MIN_SHARED:
            prefix = prefix_of(tokens, held, pending, decoder)
        if prefix is None:
            delayed.append(row)
            continue
        num_shared, source = prefix
        # A free source row needs no copy. Otherwise prefer a row that holds no prompt, to keep sources for others.
        row.storage = source if source in free else min(free, key=lambda storage: (storage in held, storage))
        free.remove(row.storage)
        held.pop(row.storage, None)
        pending[row.storage] = tokens  # until its first forward
        yield row, num_shared, source
    waiting[:0] = delayed


def rows_within(rows: Sequence[Row], max_tokens: int) -> list[Row]:
    """Return the row that has waited longest and those that fit with it into ``max_tokens``, padding included."""
    chosen: set[int] = set()
    sizes: dict[bool, tuple[int, int]] = {}
    for row in sorted(rows, key=lambda row: (row.waiting_since, row.state.num_forwards)):
        num_rows, length = sizes.get(row.pending.cached, (0, 0))
        own_rows, own_length = shape_of(row.pending)
        trial = (num_rows + own_rows, max(length, own_length))
        if trial[0] * trial[1] <= max_tokens or not chosen:
            chosen.add(row.index)
            sizes[row.pending.cached] = trial
    return [row for row in rows if row.index in chosen]
