"""What decoding gives back: responses with their counts, traces, and calls while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from refusion_lit.decoding.base import RowState


class GenerationCallback:
    """Watches a generation; override what is needed."""

    def on_commit(self, index: int, state: RowState) -> None:
        """Tokens of prompt ``index`` became final."""

    def on_finished(self, index: int, output: RowOutput) -> None:
        """Prompt ``index`` is done."""


@dataclass(frozen=True, kw_only=True)
class TraceRound:
    """One forward of one prompt, as a trace shows it.

    Attributes:
        phase: What the forward was for.
        shape: Rows and length of the prompt's share of the forward.
        positions: Text positions of the drafted tokens.
        tokens: The drafts.
        probabilities: Their probabilities.
        scores: Probabilities that a verification gave to tokens.
        accepted: Positions that became final before the next forward.
    """

    phase: str
    shape: tuple[int, int]
    positions: list[int]
    tokens: list[int]
    probabilities: list[float]
    scores: list[float]
    accepted: list[int]


@dataclass(kw_only=True)
class RowOutput:
    """What became of one prompt.

    Attributes:
        id: The prompt's id.
        token_ids: The response up to and including its end of sequence, if it has one.
        finish_reason: ``eos``, ``length``, ``stop`` (a stop string), or ``unfinished`` (places before the end
            are still masked, which no correct decoder leaves behind).
        num_forwards: Forwards in which the prompt took part.
        num_positions: Token positions that were computed for it, padding excluded.
        forward_shapes: Rows and length of its share of each forward; empty unless recorded.
        seconds: From the start of its first forward to its end.
        round_ratios: Committed tokens a forward of each round that committed any, for "paper TPF" alone.
        trace: One entry a forward; empty unless asked for.
    """

    id: str
    token_ids: list[int]
    finish_reason: str
    num_forwards: int
    num_positions: int
    seconds: float
    round_ratios: list[float] = field(default_factory=list)
    forward_shapes: list[tuple[int, int]] = field(default_factory=list)
    trace: list[TraceRound] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: end of sequence counted, nothing after it, neither prompt nor padding."""
        return len(self.token_ids)


@dataclass(kw_only=True)
class DecodingOutput:
    """What one call of :func:`decode` gave.

    Attributes:
        rows: One output a prompt, in the prompts' order.
        num_calls: Calls of the model, whatever their batch.
        num_positions: Token positions computed, padding included.
        seconds: Wall-clock seconds of the whole call, device synchronised.
        mismatches: Why the model was not trained for the decoder (only with ``allow_mismatch``).
    """

    rows: list[RowOutput]
    num_calls: int
    num_positions: int
    seconds: float
    mismatches: list[str] = field(default_factory=list)
