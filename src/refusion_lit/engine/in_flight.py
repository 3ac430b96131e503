"""A prompt that is being decoded: its decoder's state and generator, its pending request, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.output import Generation, TraceRound
from refusion_lit.engine.requests import Branch, Forward, MoreDrafts, Read, Reading, Request, Steps
from refusion_lit.engine.stopping import Stopping
from refusion_lit.types import ConstraintState
from refusion_lit.utils.require import require

_FIX = "see docs/extending.md"


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A prompt that is being decoded.

    Attributes:
        index: Its number among the submitted prompts.
        storage: Its row of the cache.
        state: The decoder's state.
        steps: The decoder's generator of requests.
        request: Its pending request to the model; ``None`` once it is finished.
        result: The generation so far, with its counts.
        spans_end: Position after the last given token of a template; no EOS is drawn before it. 0 without template.
        started: When it was admitted, in seconds.
        waiting_since: Number of the last call that it took part in.
        stopping: Looks for stop strings and a low entropy; ``None`` if the sampling options name neither.
        constraint: Which tokens may be drawn; ``None``: all.
        trace: Whether every forward is recorded.
        forward: Its last forward.
        hidden: Hidden states of that forward [position, hidden], padding included, for further reads; if they are
            guided by an earlier forward, then the states that were kept of that one.
        starts: First position of each branch among them.
        length: Length of a sequence of that forward, padding included.
        num_forwards_before: Its forwards up to the last commit.
        stopped_at: Tokens that remain if a stop string or a low entropy ends the response.
    """

    index: int
    storage: int
    state: RowState
    steps: Steps[None]
    request: Request | None
    result: Generation
    spans_end: int
    started: float
    waiting_since: int
    stopping: Stopping | None
    constraint: ConstraintState | None = None
    trace: bool = False
    forward: Forward | None = None
    hidden: Tensor | None = None
    starts: Sequence[int] = ()
    length: int = 0
    num_forwards_before: int = 0
    stopped_at: int | None = None

    @property
    def pending(self) -> Forward:
        """The pending request, which must be a forward."""
        assert isinstance(self.request, Forward)
        return self.request

    @property
    def states(self) -> Tensor:
        """Hidden states of the last forward, of which there must be one."""
        assert self.hidden is not None
        return self.hidden

    def begin_forward(self, hidden: Tensor, starts: Sequence[int], length: int) -> None:
        """Take the hidden states of the pending forward, and count it.

        Shared tokens count as if they were fed: a prompt's figures do not depend on other prompts.

        Args:
            hidden: The hidden states [position, hidden], padding included.
            starts: First position of each branch.
            length: Length of a sequence, padding included.
        """
        forward = self.pending
        self.forward = forward
        self.hidden = hidden if forward.twin_at is None else torch.cat((hidden, self.states))
        self.starts = starts
        self.length = length
        self.state.num_forwards += 1
        num_shared = self.state.num_shared if self.state.num_forwards == 1 else 0
        num_rows, own_length = forward.shape
        self.result.num_positions += sum(len(branch.tokens) for branch in forward.branches) + num_shared
        self.result.forward_shapes.append((num_rows, own_length + num_shared))
        if self.trace:
            self.result.trace.append(TraceRound(phase=forward.phase, shape=(num_rows, own_length + num_shared)))

    def reads(self, first: int) -> list[Read]:
        """Return what the pending request reads from each branch of the last forward.

        Args:
            first: Index of that forward's first hidden state among those of all rows.
        """
        assert self.forward is not None
        assert self.request is not None
        draw = self.request.draw
        more = self.request.draft_at if isinstance(self.request, MoreDrafts) else None
        found = []
        for number, (branch, start) in enumerate(zip(self.forward.branches, self.starts, strict=True)):
            draft_at = branch.draft_at if more is None else more[number]
            score_at = branch.score_at if more is None else ()
            _check_offsets(draft_at, len(branch.tokens), "draft_at")
            _check_offsets([offset for offset, _ in score_at], len(branch.tokens), "score_at")
            read = Read(
                draw=draw, branch=branch, start=first + start, draft_at=draft_at, score_at=score_at,
                prompt_id=self.state.prompt.id, spans_end=self.spans_end,
            )  # fmt: skip
            if draw.guidance is not None and draft_at:
                # The second branch, without the condition, is the next sequence.
                twin_at = self.forward.twin_at
                own = self.forward.shape[0] * self.length
                read.guide = self.length if twin_at is None else own + twin_at - start - draft_at[0]
            if self.constraint is not None:
                read.contexts = [self._context(branch, offset) for offset in draft_at]
                read.allowed = [self.constraint.allowed(*context) for context in read.contexts]
            found.append(read)
        return found

    def _context(self, branch: Branch, offset: int) -> tuple[int, list[int]]:
        """Return the place of a draw, and the response up to there as a decoder from left to right feeds it."""
        start = branch.positions[0] - self.state.prompt_length
        before = [*self.state.tokens[: max(start, 0)], *branch.tokens[max(-start, 0) : offset + 1]]
        return branch.positions[offset] + branch.shift - self.state.prompt_length, before

    def constrain(self, reads: Sequence[Read]) -> None:
        """Let the constraint replace drawn tokens."""
        assert self.constraint is not None
        for read in reads:
            drawn = zip(read.contexts, read.reading.tokens, strict=True)
            read.reading.tokens = [self.constraint.settle(*context, token) for context, token in drawn]

    def advance(self, readings: list[Reading]) -> list[int]:
        """Send the decoder its readings and take its next request; return the places that it committed, sorted."""
        answered = self.request
        num_before = self.state.num_committed
        self.request = next_request(self.steps, readings)
        committed = sorted(self.state.committed[num_before:])
        if self.trace:
            self._record(answered, readings, committed)
        if committed:
            num_new = self.state.num_forwards - self.num_forwards_before
            self.result.round_ratios.append(len(committed) / max(num_new, 1))
            self.num_forwards_before = self.state.num_forwards
        return committed

    def _record(self, answered: Request | None, readings: Sequence[Reading], committed: Sequence[int]) -> None:
        """Add a request's readings to the trace of the last forward."""
        entry = self.result.trace[-1]
        start = self.state.prompt_length
        assert self.forward is not None
        branches = self.forward.branches
        offsets = answered.draft_at if isinstance(answered, MoreDrafts) else [branch.draft_at for branch in branches]
        for branch, at, reading in zip(branches, offsets, readings, strict=True):
            entry.positions += [branch.positions[offset] + branch.shift for offset in at]
            entry.tokens += reading.tokens
            entry.probabilities += reading.probabilities
            entry.scores += reading.scores
            if not isinstance(answered, MoreDrafts):
                entry.scored += [branch.positions[offset] + 1 for offset, _ in branch.score_at]
        entry.accepted += [start + place for place in committed]


def next_request(steps: Steps[None], readings: list[Reading] | None = None) -> Request | None:
    """Return the next request of a decoder's steps, which get their readings; ``None`` at their end.

    Raises:
        ValueError: If they yield something else.
    """
    try:
        request = next(steps) if readings is None else steps.send(readings)
    except StopIteration:
        return None
    require(isinstance(request, Request), "decoder", "steps that yield a Forward or MoreDrafts", request, _FIX)
    return request


def _check_offsets(offsets: Sequence[int], length: int, name: str) -> None:
    """Refuse offsets beyond a branch, which would read another prompt's hidden states."""
    if offsets and not 0 <= min(offsets) <= max(offsets) < length:
        raise ValueError(
            f"decoder: expected {name} from 0 to {length - 1} in a branch of {length} tokens, got {offsets}; {_FIX}."
        )
