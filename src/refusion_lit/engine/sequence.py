"""A submitted prompt with its response, from the queue to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from refusion_lit.engine.decoder import RowState
from refusion_lit.engine.logprobs import LogprobRecorder
from refusion_lit.engine.output import Generation, TraceRound
from refusion_lit.engine.requests import Branch, Forward, MoreDrafts, Reading, Request, SamplingJob, Steps
from refusion_lit.engine.stopping import StopFinder
from refusion_lit.types import ConstraintState, Prompt, SamplingParams
from refusion_lit.utils.require import require

_FIX = "see docs/extending.md"


@dataclass(slots=True, eq=False, repr=False)
class PromptSequence:
    """A submitted prompt: it waits for a row of the cache, is in flight, and ends.

    Attributes:
        index: The prompt's number among the submitted prompts.
        prompt: The prompt.
        sampling: Length limit and sampling options.
        trace: Whether every forward is recorded.
        logprobs: Records log-probabilities; ``None`` if they are not wanted.
        cache_row: The prompt's row in the cache; -1 while it waits.
        started: Time of admission, in seconds.
        last_call: Number of the last call with this prompt.
        state: The decoder's state. :meth:`begin` sets it and the attributes below.
        steps: The decoder's generator.
        request: The pending request; ``None`` once the decoder is finished.
        result: The generation so far, with its counts.
        constraint: Which tokens may be drawn; ``None``: all tokens.
        stop_finder: Finds stop strings; ``None`` if there are none.
        branches: The branches that the pending request reads: the last forward's branches, with other offsets for
            further drafts.
        hidden: The last forward's hidden states [position, hidden], padding included, for further drafts. With
            guidance by an earlier forward, that forward's hidden states follow.
        starts: First position of every branch in ``hidden``; then, with an earlier forward, where its states start.
    """

    index: int
    prompt: Prompt
    sampling: SamplingParams
    trace: bool = False
    logprobs: LogprobRecorder | None = None
    cache_row: int = -1
    started: float = 0.0
    last_call: int = 0
    state: RowState = field(init=False)
    steps: Steps[None] = field(init=False)
    request: Request | None = field(init=False)
    result: Generation = field(init=False)
    constraint: ConstraintState | None = field(init=False)
    stop_finder: StopFinder | None = None
    branches: Sequence[Branch] = ()
    hidden: Tensor = field(init=False)
    starts: Sequence[int] = ()

    def begin(self, state: RowState, steps: Steps[None]) -> None:
        """Go into flight: run the decoder up to its first request."""
        prompt = self.prompt
        self.state = state
        self.steps = steps
        self.request = self._next_request(None)
        self.result = Generation(id=prompt.id)
        self.constraint = None if prompt.constraint is None else prompt.constraint.begin(state.max_length)

    @property
    def forward(self) -> Forward:
        """The pending request, which must be a forward."""
        assert isinstance(self.request, Forward)
        return self.request

    @property
    def awaits_drafts(self) -> bool:
        """Whether the pending request makes drafts that belong to the model's last forward."""
        return isinstance(self.request, MoreDrafts) or (self.request is not None and self.request.by_drafter)

    def record_forward(self, hidden: Tensor, shape: tuple[int, int], starts: Sequence[int]) -> None:
        """Take the pending forward's hidden states, and count the forward.

        Shared tokens count as if they were fed: a prompt's figures do not depend on other prompts.

        Args:
            hidden: The hidden states.
            shape: Its rows and length.
            starts: First position of every branch.
        """
        forward = self.forward
        self.starts = starts
        if forward.twin_at is not None:
            self.starts = [*starts, len(hidden) + forward.twin_at]
            hidden = torch.cat((hidden, self.hidden))
        self.hidden = hidden
        if forward.by_drafter:  # its drafts belong to the round of the model's last forward
            self.result.num_drafter_forwards += 1
            return
        self.state.num_forwards += 1
        num_shared = self.state.num_shared if self.state.num_forwards == 1 else 0
        shape = (shape[0], shape[1] + num_shared)
        self.result.num_positions += sum(len(branch.tokens) for branch in forward.branches) + num_shared
        self.result.forward_shapes.append(shape)
        if self.trace:
            self.result.trace.append(TraceRound(phase=forward.phase, shape=shape))

    def sampling_jobs(self, first: int) -> list[SamplingJob]:
        """Return the pending request's sampling jobs, branch by branch.

        Args:
            first: Index of this prompt's first hidden state among the call's hidden states.
        """
        assert self.request is not None
        draw = self.request.draw
        guide = 0 if draw.guidance is None else self.starts[1]  # the first branch, at 0, is guided
        by_drafter = isinstance(self.request, Forward) and self.request.by_drafter
        wants = self.logprobs is not None and not by_drafter  # log-probabilities are the model's
        return [
            SamplingJob(draw, branch, first + start, self.prompt, self.state.tokens, self.constraint, guide, wants)
            for branch, start in zip(self.branches, self.starts, strict=False)
        ]

    def advance(self, readings: list[Reading]) -> bool:
        """Send the decoder its readings and take its next request; return whether it has committed tokens."""
        state = self.state
        branches = self.branches
        num_before = state.num_committed
        num_forwards = state.num_forwards
        self.request = self._next_request(readings)
        if self.logprobs is not None:
            self.logprobs.record(state, branches, readings, num_forwards)
        committed = sorted(state.committed[num_before:])
        if self.trace:
            self.result.trace[-1].add(branches, readings, [state.prompt_length + place for place in committed])
        if committed:
            last_commit = state.commit_rounds[state.committed[num_before - 1]] if num_before else 0
            self.result.round_ratios.append(len(committed) / max(state.num_forwards - last_commit, 1))
        return bool(committed)

    def _next_request(self, readings: list[Reading] | None) -> Request | None:
        """Send the decoder its readings (none at first), and return its next request; ``None`` at the end.

        Raises:
            ValueError: If the decoder yields anything but a request, or an offset beyond a branch: another prompt's
                hidden states may be there.
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
            branches = () if isinstance(branches, Branch) else branches  # (branch) in place of (branch,)
        expected = "steps that yield a Forward with branches, or MoreDrafts for each branch of the last Forward"
        require(bool(branches), "decoder", expected, request, _FIX)
        for branch in branches:
            offsets = [0, *branch.draft_at, *(offset for offset, _ in branch.score_at)]
            num_tokens = len(branch.tokens)
            is_whole = num_tokens == len(branch.positions) and min(branch.positions, default=0) >= 0
            if not (is_whole and 0 <= min(offsets) <= max(offsets) < num_tokens):
                expected = "branches with tokens, a position from 0 for each, and draft_at and score_at among them"
                got = f"{num_tokens} tokens at {branch.positions!r:.99} and offsets {offsets[1:]!r:.99}"
                raise ValueError(f"decoder: expected {expected}, got {got}; {_FIX}.")
        self.branches = branches
        return request
