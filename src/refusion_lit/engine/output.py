"""Decoding results: a record per prompt, a call's totals, and callbacks during the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from refusion_lit.engine.logprobs import TokenLogprob

if TYPE_CHECKING:
    from refusion_lit.engine.decoder import RowState
    from refusion_lit.engine.requests import Branch, Reading


class GenerationCallback:
    """Observes a generation; override the methods that you need."""

    def on_commit(self, index: int, state: RowState) -> None:
        """Receive a prompt's state after it has committed tokens."""

    def on_finished(self, index: int, generation: Generation) -> None:
        """Receive a finished prompt's generation."""


@dataclass(kw_only=True)
class TraceRound:
    """A prompt's forward, as shown in a trace.

    Attributes:
        phase: The forward's purpose.
        shape: Rows and length that the prompt takes in the call.
        positions: The drafts' text positions.
        tokens: The drafts.
        probabilities: Their probabilities.
        scored: The verified tokens' text positions.
        scores: The verified tokens' probabilities.
        accepted: Positions committed before the next forward.
    """

    phase: str
    shape: tuple[int, int]
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, branches: Sequence[Branch], readings: Sequence[Reading], accepted: Sequence[int]) -> None:
        """Add the readings of the forward's branches, and the positions committed after them."""
        for branch, reading in zip(branches, readings, strict=True):
            self.positions += [branch.positions[offset] + branch.shift for offset in branch.draft_at]
            self.tokens += reading.tokens
            self.probabilities += reading.probabilities
            self.scored += [branch.positions[offset] + 1 for offset, _ in branch.score_at]
            self.scores += reading.scores
        self.accepted += accepted


@dataclass(kw_only=True)
class Generation:
    """One prompt's response with its counts, timing and trace.

    Attributes:
        id: The prompt's id.
        token_ids: Response tokens up to and including the EOS token, given tokens included.
        text: The response without special tokens, cut before the first stop string; empty without a tokenizer.
        finish_reason: ``eos``, ``length``, ``stop`` (a stop string), or ``unfinished`` (masked places remain before the
            end, which no correct decoder leaves).
        num_tokens: Number of generated tokens: tokens in ``token_ids`` that were not given.
        num_forwards: Forwards in which the prompt took part. Decoders that weigh a forward's cost (``SelfSpeculative``
            and ``infill: bonus`` of ``ReFusion``) take more or fewer forwards beside other prompts, for the same text.
        num_drafter_forwards: A block drafter's forwards (DFlash); ``num_forwards`` and ``num_positions`` do not count
            them.
        num_positions: Token positions computed for the prompt, without padding; positions copied from other prompts
            count too.
        seconds: Time from the prompt's admission to its end.
        round_ratios: Committed tokens per forward, by round, for rounds that committed tokens; only for the paper's TPF
            figure.
        forward_shapes: Rows and length that the prompt takes in its forwards.
        trace: One entry per forward; empty unless a trace was requested.
        logprobs: Log-probabilities of the tokens in ``token_ids``; empty unless they were requested. ``None`` for
            tokens that no forward pass has read: given tokens, and an end of the thinking that the decoder writes.
    """

    id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "unfinished"
    num_tokens: int = 0
    num_forwards: int = 0
    num_drafter_forwards: int = 0
    num_positions: int = 0
    seconds: float = 0.0
    round_ratios: list[float] = field(default_factory=list)
    forward_shapes: list[tuple[int, int]] = field(default_factory=list)
    trace: list[TraceRound] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def num_given(self) -> int:
        """How many tokens in ``token_ids`` were given."""
        return len(self.token_ids) - self.num_tokens


class CallShapes:
    """Counts model calls by shape, in little memory.

    Calls with the same numbers of sequences, positions and logits form an entry, because their cost is linear in the
    cache length. A call that only runs the LM head has no positions.

    >>> shapes = CallShapes()
    >>> shapes.add(num_sequences=2, num_positions=2, num_logits=2, cache_length=10)
    >>> shapes.add(num_sequences=2, num_positions=2, num_logits=2, cache_length=11)
    >>> shapes.lines()
    ['2 2 2 2 21']

    Attributes:
        counts: Number of calls and the sum of their cache lengths, by ``(num_sequences, num_positions, num_logits)``.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int, int], tuple[int, int]] = {}

    def add(self, *, num_sequences: int, num_positions: int, num_logits: int, cache_length: int) -> None:
        """Count a call.

        Args:
            num_sequences: Number of prompts in the call.
            num_positions: Positions computed by the body for all of them, without padding.
            num_logits: Positions whose logits the LM head computes.
            cache_length: Largest number of keys that attention reads for a sequence, including keys written by the
                call.
        """
        shape = (num_sequences, num_positions, num_logits)
        num_calls, total = self.counts.get(shape, (0, 0))
        self.counts[shape] = (num_calls + 1, total + cache_length)

    def merge(self, other: CallShapes) -> None:
        """Add the calls of another count."""
        for shape, (more_calls, more_length) in other.counts.items():
            num_calls, total = self.counts.get(shape, (0, 0))
            self.counts[shape] = (num_calls + more_calls, total + more_length)

    def lines(self) -> list[str]:
        """Return entries as ``num_sequences num_positions num_logits num_calls cache_length``, sorted, for JSON."""
        return [" ".join(map(str, (*shape, *count))) for shape, count in sorted(self.counts.items())]

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> CallShapes:
        """Read what :meth:`lines` returned.

        Raises:
            ValueError: If a line has other than five whole numbers.
        """
        shapes = cls()
        for line in lines:
            num_sequences, num_positions, num_logits, num_calls, cache_length = map(int, line.split())
            shapes.counts[num_sequences, num_positions, num_logits] = (num_calls, cache_length)
        return shapes


@dataclass(kw_only=True)
class DecodingOutput:
    """The result of :func:`~refusion_lit.decoding.decode`.

    Attributes:
        rows: The prompts' generations, in the prompts' order.
        num_calls: Calls to the model; a call for several prompts counts once.
        num_positions: Token positions computed, padding included.
        call_shapes: The calls by shape, for ``refusion-lit report --project``.
        num_shared: Prompt tokens whose KV cache entries were copied from other prompts instead of computed.
        cache_bytes: The KV cache's peak memory.
        cache_bytes_per_token: Memory per cache entry; 0 if nothing was cached.
        seconds: The call's wall-clock seconds, device synchronised.
        mismatches: Why the model does not fit the decoder (only with ``allow_mismatch``).
    """

    rows: list[Generation] = field(default_factory=list)
    num_calls: int = 0
    num_positions: int = 0
    seconds: float = 0.0
    call_shapes: CallShapes = field(default_factory=CallShapes)
    num_shared: int = 0
    cache_bytes: int = 0
    cache_bytes_per_token: float = 0.0
    mismatches: list[str] = field(default_factory=list)
