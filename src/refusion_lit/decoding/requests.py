"""What a decoder asks of the model for one prompt, and what it gets back.

A decoder is written for a single prompt; the engine batches the requests of many prompts into shared
forwards. All that comes back is plain numbers, so that one host-device synchronisation a forward suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from refusion_lit.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One sequence of tokens of a forward.

    A prompt's forward has one branch, or several that share the prompt's cached context without seeing each other.

    Attributes:
        tokens: Token ids in sequence order.
        positions: Place of each token in the text (prompt first).
        order: A token sees the branch's tokens of no higher order; ``None`` means causal, all zeros bidirectional.
        visible: Ranges ``(start, stop)`` of cache indices that every token of the branch sees besides. They may hold
            entries that other branches of the same forward write: that is how one branch sees part of another.
        write_at: Cache index of the first token's keys and values; the others follow.
        draft_at: Offsets into ``tokens`` whose logits a token is drawn from.
        score_at: Pairs of an offset and a token id whose probability under the logits there is wanted.
        prefetch_at: Groups of offsets whose tokens :class:`MoreDrafts` may ask for: a group for each ``draft_at``,
            wanted if that draft is, or, where nothing is drafted, any groups.
        num_prefetch: How many of the groups will probably be asked for, those of the most probable drafts. Accelerators
            draw these at once, so that the host need not wait for them another time; it changes no token.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    order: Sequence[int] | None = None
    visible: tuple[tuple[int, int], ...] = ()
    write_at: int = 0
    draft_at: Sequence[int] = ()
    score_at: Sequence[tuple[int, int]] = ()
    prefetch_at: Sequence[Sequence[int]] = ()
    num_prefetch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How tokens are drawn from logits.

    Attributes:
        sampling: Temperature, top-p, top-k and seed.
        round: Number of the draw within its prompt; with the position it keys the noise.
        shift: Predicted position minus the position of the token whose logits are read (0, or 1 when shifted).
        forbidden: Ids never drawn besides those that no decoder draws.
        guidance: Weight w of classifier-free guidance, l_u + (w + 1)(l_c - l_u), between the forward's two
            branches: first the conditional one, then the unconditional one; ``None`` for none.
        confidence_forbidden: Ids left out of the softmax that gives the confidence (LLaDA's EOS option).
        statistics: Wanted besides: ``margin`` (difference of the two highest filtered probabilities),
            ``negative_entropy`` (of the filtered distribution, nats), ``filtered`` (the drawn token's probability
            after temperature, top-p and top-k).
        with_probability: Whether anybody looks at the drafts' probabilities, which are much of the work.
    """

    sampling: SamplingParams
    round: int = 0
    shift: int = 0
    forbidden: tuple[int, ...] = ()
    guidance: float | None = None
    confidence_forbidden: tuple[int, ...] = ()
    statistics: tuple[str, ...] = ()
    with_probability: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One call of the model, as far as one prompt is concerned.

    Attributes:
        phase: What it is for (``plan``, ``verify``, ...), for traces.
        branches: The sequences.
        packed: Whether the branches become one row of the call, one behind the other, instead of a row each. Packed
            or not, a branch sees what it names and nothing else.
        draw: How drafts are drawn.
        cached: Whether keys and values are stored; without, ``visible`` must be empty.
        keep: Cache indices that become the cache's first entries, in that order, before the forward.
            Later entries stay where they are until overwritten, but nothing should refer to them.
    """

    phase: str
    branches: tuple[Branch, ...]
    draw: Draw
    cached: bool = True
    packed: bool = False
    keep: Sequence[int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length of its share of the call."""
        lengths = [len(branch.tokens) for branch in self.branches]
        return (1, sum(lengths)) if self.packed else (len(lengths), max(lengths))

    def starts(self, length: int) -> list[int]:
        """Return where each branch begins in this forward's rows of a call, laid end to end, of ``length`` each."""
        if not self.packed:
            return [i * length for i in range(len(self.branches))]
        return list(accumulate((len(branch.tokens) for branch in self.branches[:-1]), initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreDrafts:
    """Drafts at further offsets of the forward just made: the head is computed only where it is read.

    Attributes:
        draft_at: Offsets for each branch of that forward.
        draw: How they are drawn.
    """

    draft_at: tuple[Sequence[int], ...]
    draw: Draw


Request = Forward | MoreDrafts


@dataclass(slots=True)
class Reading:
    """What was read off one branch's logits.

    Attributes:
        tokens: Drawn token for each ``draft_at``.
        probabilities: Its probability under the softmax of the unchanged logits (guidance included), in [0, 1]; none
            if the draw wanted none, unless a trace is recorded.
        statistics: One list a wanted statistic.
        scores: Probability for each ``score_at``.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    statistics: dict[str, list[float]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
