"""Submitted prompts: the queue that gives them rows of the cache and finds prefixes to share, and prompts in flight.

Few-shot examples, system messages and instructions repeat. The common prefix of two prompts is computed for one of
them, and its KV cache entries are copied for the other. Rows of prompts in flight and rows of finished prompts serve as
the store, so sharing takes no extra memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from refusion_lit.engine.batch import shape_of
from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.output import Generation, TraceRound
from refusion_lit.engine.requests import Branch, Forward, MoreDrafts, Read, Reading, Request, Steps
from refusion_lit.engine.sampling import constrain
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
        source: The row from which its first entries are copied, possibly ``storage`` itself; -1 if nothing is shared.
        num_shared: Number of copied entries.
        started: When it was admitted, in seconds.
        waiting_since: Number of the last call that it took part in.
        state: The decoder's state. It and what follows are set by :meth:`begin`.
        steps: The decoder's generator of requests.
        request: Its pending request to the model; ``None`` once it is finished.
        result: The generation so far, with its counts.
        spans_end: Position after the last given token of a template; no EOS is drawn before it. 0 without template.
        stopping: Looks for stop strings and a low entropy; ``None`` if the sampling options name neither.
        constraint: Which tokens may be drawn; ``None``: all.
        num_forwards_before: Its forwards up to the last commit.
        forward: Its last forward.
        branches: What the pending request reads: that forward's branches, or for further drafts their other offsets.
        hidden: Hidden states of that forward [position, hidden], padding included, for further reads; if they are
            guided by an earlier forward, then the states that were kept of that one.
        starts: First position of each branch among them.
        length: Length of a sequence of that forward, padding included.
    """

    index: int
    prompt: Prompt
    sampling: SamplingParams
    trace: bool = False
    storage: int = -1
    source: int = -1
    num_shared: int = 0
    started: float = 0.0
    waiting_since: int = 0
    state: RowState = field(init=False)
    steps: Steps[None] = field(init=False)
    request: Request | None = field(init=False)
    result: Generation = field(init=False)
    spans_end: int = field(init=False)
    stopping: Stopping | None = field(init=False)
    constraint: ConstraintState | None = field(init=False)
    num_forwards_before: int = 0
    forward: Forward = field(init=False)
    branches: Sequence[Branch] = ()
    hidden: Tensor = field(init=False)
    starts: Sequence[int] = ()
    length: int = 0

    def begin(self, state: RowState, steps: Steps[None], detokenize: Callable[[list[int]], str] | None) -> None:
        """Go into flight: run the decoder up to its first request; stop strings need ``detokenize``."""
        prompt, sampling = self.prompt, self.sampling
        self.state = state
        self.steps = steps
        self.request = self._next(None)
        self.result = Generation(id=prompt.id)
        self.spans_end = len(prompt.token_ids) + prompt.given_length if prompt.num_to_fill else 0
        stops = bool(sampling.stop) or sampling.min_entropy is not None
        self.stopping = Stopping(sampling, detokenize) if stops else None
        self.constraint = None if prompt.constraint is None else prompt.constraint.begin(state.max_length)

    @property
    def pending(self) -> Forward:
        """The pending request, which must be a forward."""
        assert isinstance(self.request, Forward)
        return self.request

    def begin_forward(self, hidden: Tensor, starts: Sequence[int], length: int) -> None:
        """Take the hidden states of the pending forward, and count it.

        Shared tokens count as if they were fed: a prompt's figures do not depend on other prompts.
        """
        forward = self.pending
        self.forward = forward
        self.branches = forward.branches
        self.hidden = hidden if forward.twin_at is None else torch.cat((hidden, self.hidden))
        self.starts = starts
        self.length = length
        self.state.num_forwards += 1
        num_shared = self.num_shared if self.state.num_forwards == 1 else 0
        num_rows, own_length = shape_of(forward)
        self.result.num_positions += sum(len(branch.tokens) for branch in forward.branches) + num_shared
        self.result.forward_shapes.append((num_rows, own_length + num_shared))
        if self.trace:
            self.result.trace.append(TraceRound(phase=forward.phase, shape=(num_rows, own_length + num_shared)))

    def reads(self, first: int) -> list[Read]:
        """Return what the pending request reads from each branch of the last forward.

        Args:
            first: Index of that forward's first hidden state among those of all rows.
        """
        assert self.request is not None
        draw = self.request.draw
        found = []
        for branch, start in zip(self.branches, self.starts, strict=True):
            _check_offsets(branch.draft_at, len(branch.tokens), "draft_at")
            _check_offsets([offset for offset, _ in branch.score_at], len(branch.tokens), "score_at")
            read = Read(draw, branch, first + start, self.prompt.id, self.spans_end)
            if draw.guidance is not None and branch.draft_at:
                # The second branch, without the condition, is the next sequence.
                twin_at = self.forward.twin_at
                own = shape_of(self.forward)[0] * self.length
                read.guide = self.length if twin_at is None else own + twin_at - start - branch.draft_at[0]
            if self.constraint is not None:
                constrain(read, self.constraint, self.state)
            found.append(read)
        return found

    def advance(self, readings: list[Reading]) -> list[int]:
        """Send the decoder its readings and take its next request; return the places that it committed, sorted."""
        branches = self.branches
        num_before = self.state.num_committed
        self.request = self._next(readings)
        committed = sorted(self.state.committed[num_before:])
        if self.trace:
            positions = [self.state.prompt_length + place for place in committed]
            self.result.trace[-1].add(branches, readings, positions)
        if committed:
            num_new = self.state.num_forwards - self.num_forwards_before
            self.result.round_ratios.append(len(committed) / max(num_new, 1))
            self.num_forwards_before = self.state.num_forwards
        return committed

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


def _check_offsets(offsets: Sequence[int], length: int, name: str) -> None:
    """Refuse offsets beyond a branch, which would read another prompt's hidden states."""
    if offsets and not 0 <= min(offsets) <= max(offsets) < length:
        raise ValueError(
            f"decoder: expected {name} from 0 to {length - 1} in a branch of {length} tokens, got {offsets}; {_FIX}."
        )


class Admission:
    """Prompts that wait for a row of the cache, and the prompts whose KV cache entries the rows hold.

    Args:
        num_rows: Rows of the cache.
        decoder: Determines how much of a common prefix may be shared; ``None``: nothing is shared.
        held: Prompts whose entries the rows hold from an earlier engine, by row.

    Attributes:
        waiting: Prompts without a row, in their order.
        held: Prompts whose entries are computed, by row. Entries of a finished prompt stay until its row is reused.
    """

    def __init__(self, num_rows: int, decoder: Decoder | None, held: Mapping[int, Tokens] | None = None) -> None:
        self.waiting: deque[Row] = deque()
        self._free = set(range(num_rows))
        self._num_rows = num_rows
        self._decoder = decoder
        self.held = dict(held or {})
        self._pending: dict[int, Tokens] = {}  # prompts whose first forward is still to come, by row

    def admit(self) -> Iterator[Row]:
        """Assign free rows to waiting prompts.

        A prompt is held back if a prompt in flight will soon have a prefix to share that is at least ``MIN_SHARED``
        tokens longer than any cached one. Later prompts may go first; at most ``num_rows`` prompts are held back.
        """
        delayed: list[Row] = []
        while self.waiting and self._free and len(delayed) < self._num_rows:
            waiting = self.waiting.popleft()
            tokens = waiting.prompt.token_ids
            waiting.num_shared, waiting.source = self._longest(self.held, tokens)
            if self._longest(self._pending, tokens)[0] >= waiting.num_shared + MIN_SHARED:
                delayed.append(waiting)
                continue
            # A free source row needs no copy. Otherwise prefer a row that holds no prompt, to keep sources for others.
            is_free = waiting.source in self._free
            storage = waiting.source if is_free else min(self._free, key=lambda row: (row in self.held, row))
            self._free.remove(storage)
            self.held.pop(storage, None)
            self._pending[storage] = tokens
            waiting.storage = storage
            yield waiting
        self.waiting.extendleft(reversed(delayed))

    def computed(self, storage: int) -> None:
        """Record that a row's first forward has run."""
        if storage in self._pending:
            self.held[storage] = self._pending.pop(storage)

    def release(self, storage: int) -> None:
        """Take back the row of a finished prompt."""
        self._free.add(storage)
        self._pending.pop(storage, None)  # pending still if the prompt ended without a forward

    def _longest(self, prompts: Mapping[int, Tokens], tokens: Tokens) -> tuple[int, int]:
        """Return the largest number of tokens to share with one of the prompts, and its row; 0 and -1 if too few."""
        if self._decoder is None:
            return 0, -1
        best = 0
        row = -1
        head = tokens[:MIN_SHARED]
        for storage, other in prompts.items():
            if other[:MIN_SHARED] == head:
                pairs = enumerate(zip(tokens, other, strict=False))
                num_common = next((i for i, (own, its) in pairs if own != its), min(len(tokens), len(other)))
                length = self._decoder.num_shareable(len(tokens), num_common)
                if length > best:
                    best = length
                    row = storage
        return (best, row) if best >= MIN_SHARED else (0, -1)
