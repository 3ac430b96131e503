"""Submitted prompts: the queue that gives them rows of the cache and finds prefixes to share, and prompts in flight.

Few-shot examples, system messages and instructions repeat. The common prefix of two prompts is computed for one of
them, and its KV cache entries are copied for the other. Rows of prompts in flight and rows of finished prompts serve as
the store, so sharing takes no extra memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from os.path import commonprefix

import torch
from torch import Tensor

from refusion_lit.engine.batch import shape_of
from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.output import Generation, TraceRound
from refusion_lit.engine.requests import Branch, Forward, MoreDrafts, Read, Reading, Request, Steps
from refusion_lit.engine.stopping import Stopping
from refusion_lit.types import ConstraintState, Prompt, SamplingParams
from refusion_lit.utils.require import require

MIN_SHARED = 64
"""Minimum number of tokens to share; shorter prefixes are recomputed: waiting one forward for them costs more."""

Tokens = tuple[int, ...]

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
        stopping: Looks for stop strings and a low entropy; ``None`` if the sampling options name neither.
        constraint: Which tokens may be drawn; ``None``: all.
        branches: What the pending request reads: the last forward's branches, with other offsets for further drafts.
        hidden: Hidden states of that forward [position, hidden], padding included, for further reads; if they are
            guided by an earlier forward, then the states that were kept of that one.
        starts: First position of each branch among them.
        twin_start: Position among them of the earlier forward's unconditional logits; ``None`` without that forward.
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
    stopping: Stopping | None = field(init=False)
    constraint: ConstraintState | None = field(init=False)
    branches: Sequence[Branch] = ()
    hidden: Tensor = field(init=False)
    starts: Sequence[int] = ()
    twin_start: int | None = None

    def begin(self, state: RowState, steps: Steps[None], detokenize: Callable[[list[int]], str] | None) -> None:
        """Go into flight: run the decoder up to its first request; stop strings need ``detokenize``."""
        prompt, sampling = self.prompt, self.sampling
        self.state = state
        self.steps = steps
        self.request = self._next(None)
        self.result = Generation(id=prompt.id)
        stops = bool(sampling.stop) or sampling.min_entropy is not None
        self.stopping = Stopping(sampling, detokenize) if stops else None
        self.constraint = None if prompt.constraint is None else prompt.constraint.begin(state.max_length)

    @property
    def pending(self) -> Forward:
        """The pending request, which must be a forward."""
        assert isinstance(self.request, Forward)
        return self.request

    def begin_forward(self, hidden: Tensor, starts: Sequence[int]) -> None:
        """Take the hidden states of the pending forward, and count it.

        Shared tokens count as if they were fed: a prompt's figures do not depend on other prompts.
        """
        forward = self.pending
        self.branches = forward.branches
        self.starts = starts
        self.twin_start = None if forward.twin_at is None else len(hidden) + forward.twin_at
        self.hidden = hidden if forward.twin_at is None else torch.cat((hidden, self.hidden))
        self.state.num_forwards += 1
        num_shared = self.state.num_shared if self.state.num_forwards == 1 else 0
        num_rows, own_length = shape_of(forward)
        shape = (num_rows, own_length + num_shared)
        self.result.num_positions += sum(len(branch.tokens) for branch in forward.branches) + num_shared
        self.result.forward_shapes.append(shape)
        if self.trace:
            self.result.trace.append(TraceRound(phase=forward.phase, shape=shape))

    def reads(self, first: int) -> list[Read]:
        """Return what the pending request reads from each branch of the last forward.

        Args:
            first: Index of that forward's first hidden state among those of all rows.

        Raises:
            ValueError: If an offset is beyond a branch, where another prompt's hidden states may be.
        """
        assert self.request is not None
        draw = self.request.draw
        found = []
        for branch, start in zip(self.branches, self.starts, strict=True):
            offsets = [*branch.draft_at, *(offset for offset, _ in branch.score_at)]
            last = len(branch.tokens) - 1
            if offsets and not 0 <= min(offsets) <= max(offsets) <= last:
                expected = f"draft_at and score_at from 0 to {last} in a branch of {last + 1} tokens"
                raise ValueError(f"decoder: expected {expected}, got {offsets}; {_FIX}.")
            read = Read(draw, branch, first + start, self.state, self.constraint)
            if draw.guidance is not None and branch.draft_at:
                # Without an earlier forward, the second branch has the unconditional logits.
                own = self.starts[1] if self.twin_start is None else self.twin_start - branch.draft_at[0]
                read.guide = own - start
            found.append(read)
        return found

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
            ValueError: If it yields something else.
        """
        try:
            request = self.steps.send(readings)  # pyright: ignore[reportArgumentType] - None starts a generator
        except StopIteration:
            return None
        require(isinstance(request, Request), "decoder", "steps that yield a Forward or MoreDrafts", request, _FIX)
        if isinstance(request, MoreDrafts):
            num = len(self.branches)  # 0 before the first forward
            expected = f"MoreDrafts with offsets in each of the last forward's branches ({num})"
            require(0 < num == len(request.draft_at), "decoder", expected, f"offsets in {len(request.draft_at)}", _FIX)
            pairs = zip(self.branches, request.draft_at, strict=True)
            self.branches = [replace(branch, draft_at=offsets, score_at=()) for branch, offsets in pairs]
        return request


def admit(
    waiting: list[Row], rows: Sequence[Row], held: dict[int, Tokens], num_rows: int, decoder: Decoder | None
) -> Iterator[tuple[Row, int, int]]:
    """Assign free rows of the cache to waiting prompts.

    A prompt is held back if a prompt in flight will soon have a prefix to share that is at least ``MIN_SHARED`` tokens
    longer than any cached one. Later prompts may go first; at most ``num_rows`` prompts are held back.

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
        num_shared, source = _longest(held, tokens, decoder)
        if _longest(pending, tokens, decoder)[0] >= num_shared + MIN_SHARED:
            delayed.append(row)
            continue
        # A free source row needs no copy. Otherwise prefer a row that holds no prompt, to keep sources for others.
        row.storage = source if source in free else min(free, key=lambda storage: (storage in held, storage))
        free.remove(row.storage)
        held.pop(row.storage, None)
        pending[row.storage] = tokens  # until its first forward
        yield row, num_shared, source
    waiting[:0] = delayed


def _longest(prompts: Mapping[int, Tokens], tokens: Tokens, decoder: Decoder | None) -> tuple[int, int]:
    """Return the largest number of tokens to share with one of the prompts, and its row; 0 and -1 if too few."""
    if decoder is None:
        return 0, -1
    head = tokens[:MIN_SHARED]
    found = [
        (decoder.num_shareable(len(tokens), len(commonprefix([tokens, other]))), storage)  # noqa: RUF071 - no paths
        for storage, other in prompts.items()
        if other[:MIN_SHARED] == head
    ]
    best = max(found, key=itemgetter(0), default=(0, -1))
    return best if best[0] >= MIN_SHARED else (0, -1)
