"""Requests that a decoder yields for one prompt (forwards, further drafts), and the engine's answers, the readings.

The engine batches many prompts' requests into shared calls of the model. Readings are plain numbers, so one
device-to-host transfer per call is enough; proposals' distributions stay on the device.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torch import Tensor

from refusion_lit.types import ConstraintState, Prompt, SamplingParams

T = TypeVar("T")
Statistic = Literal["margin", "negative_entropy", "probability", "entropy"]
Confidence = Literal["raw", "filtered", "tempered"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft with its distribution, for rejection sampling.

    Attributes:
        token: The draft.
        probabilities: The distribution [vocab], after temperature and filters; stays on the model's device.
    """

    token: int
    probabilities: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A token segment in a forward. A forward's branches share the cached context and do not see each other.

    Attributes:
        tokens: Token ids in sequence order.
        positions: The tokens' positions in the text, counted from the prompt's start.
        order: Non-decreasing numbers; a token sees the branch's tokens with the same or a lower number. ``None``:
            causal; zeros: bidirectional.
        visible: Ranges ``(start, stop)`` of cache indices that all tokens in the branch also see. A range may cover
            entries that another branch writes in the same forward; the branch then sees part of the other branch.
        write_at: Cache index of the first token's KV cache entry; the other tokens follow.
        shift: Predicted position minus the position of the logits: 0 where masks predict themselves, 1 where tokens
            predict the next token.
        draft_at: Offsets into ``tokens``; a token is drawn from the logits at every offset.
        score_at: Pairs of an offset and a token id: the id's probability under the logits at the offset is read.
        proposals: Earlier drafts by offset in ``draft_at``; rejection sampling keeps or replaces them.
        signal: Soft embeddings of the branch's tokens for self-conditioning, from the previous step's reading.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    order: Sequence[int] | None = None
    visible: tuple[tuple[int, int], ...] = ()
    write_at: int = 0
    shift: int = 0
    draft_at: Sequence[int] = ()
    score_at: Sequence[tuple[int, int]] = ()
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    signal: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Options for drawing tokens from logits.

    Attributes:
        sampling: Temperature, top-p, top-k and seed.
        round: The draw's number within its prompt. Number and position key the noise.
        forbidden: Further ids that are never drawn, in addition to the ids that no decoder draws.
        guidance: Classifier-free guidance weight w in l_u + (w + 1)(l_c - l_u). The forward's first branch gives the
            conditional logits l_c, its second branch the unconditional logits l_u. ``None``: no guidance.
        confidence_forbidden: Ids left out of the softmax for probabilities (LLaDA's EOS options).
        confidence_temperature: Divides the logits for the probabilities alone; above 0 (WeDLM).
        statistic: Extra figure per draft: ``margin`` (difference of the two highest probabilities),
            ``negative_entropy`` (in nats), ``probability`` (of the drawn token), ``entropy`` (in nats, always of the
            raw distribution). Ids that no decoder draws stay in the distribution, ``forbidden`` ids do not.
        confidence: Distribution of the statistic: ``raw`` (softmax of the logits), ``filtered`` (after top-k and
            top-p), ``tempered`` (after temperature, top-k and top-p: the distribution of the drawn tokens). At
            temperature 0, ``tempered`` equals ``filtered``.
        top_p_first: Apply top-p before top-k (Dream); by default top-k comes first (transformers).
        with_probability: Whether the drafts' probabilities are used; without them the softmax is skipped.
        denoises: Whether readings also have the most probable tokens, and the filtered distributions' soft embeddings,
            which condition the next step.
        proposes: Whether readings hand out the drafts as proposals. Their noise is independent of other draws' noise
            at the same position. Needs a temperature above 0.
    """

    sampling: SamplingParams
    round: int = 0
    forbidden: tuple[int, ...] = ()
    guidance: float | None = None
    confidence_forbidden: tuple[int, ...] = ()
    confidence_temperature: float = 1.0
    statistic: Statistic | None = None
    confidence: Confidence = "tempered"
    top_p_first: bool = False
    with_probability: bool = True
    denoises: bool = False
    proposes: bool = False


@dataclass(frozen=True, slots=True)
class Compaction:
    """A prompt's cache entries that survive a compaction of its row.

    Attributes:
        num_leading: Number of entries at the start that stay in place.
        indices: Entries that move behind them, in this order.
    """

    num_leading: int
    indices: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One prompt's share of a model call.

    Attributes:
        phase: Purpose (``plan``, ``verify``, ...), shown in traces.
        branches: The segments that are fed.
        draw: How drafts are drawn.
        cached: Whether KV cache entries are stored; if not, ``visible`` must be empty.
        canvas: Whether the branches are canvases behind the text: any token may be wrong, and the next forward
            overwrites their entries. A model with a separate decoder for canvases runs this decoder.
        packed: Whether the branches share one row in the call, one after the other. Otherwise, every branch has a row.
            The choice changes the layout only, not which tokens a branch sees.
        keep: Entries to keep when the cache is compacted before the forward; ``None``: no compaction.
        by_drafter: Whether the model's block drafter computes the forward. The forward does not count as a model
            forward.
        twin_at: For ``draw.guidance``: take the unconditional logits from the first row in the prompt's previous
            forward, at the first branch's offsets plus this number. ``None``: take them from the second branch.
    """

    phase: str
    branches: tuple[Branch, ...]
    draw: Draw
    cached: bool = True
    canvas: bool = False
    packed: bool = False
    keep: Compaction | None = None
    by_drafter: bool = False
    twin_at: int | None = None

    @property
    def kind(self) -> tuple[bool, bool]:
        """The properties shared by all forwards in a model call."""
        return self.cached, self.canvas


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreDrafts:
    """Request for further drafts from the last forward's hidden states; runs the head, but not the body.

    Attributes:
        draft_at: Offsets for all branches in the last forward.
        draw: How they are drawn.
    """

    draft_at: tuple[Sequence[int], ...]
    draw: Draw


Request = Forward | MoreDrafts


@dataclass(slots=True)
class Reading:
    """Tokens, probabilities and other figures read from one branch's logits.

    Attributes:
        tokens: The drawn tokens, in the order of ``draft_at``.
        probabilities: Their probabilities under the softmax of the unfiltered logits (after guidance), in [0, 1]. Empty
            if the draw requests no probabilities and no trace is recorded.
        statistic: Their requested statistics; empty without a request.
        scores: The probabilities that ``score_at`` requests.
        proposals: The drafts with their distributions, if the draw proposes them.
        best: The most probable tokens, if the draw denoises.
        signal: Soft embeddings of the drafts' distributions, if the draw denoises and the model conditions itself.
        logprobs: Log-softmax of the logits at ``draft_at`` and then ``score_at`` [position, vocab]; stays on the
            model's device. ``None`` unless log-probabilities are recorded.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    statistic: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    signal: Tensor | None = None
    logprobs: Tensor | None = None


@dataclass(slots=True)
class SamplingJob:
    """A branch's sampling job: drafts at some offsets, scores of given tokens at others.

    Attributes:
        draw: How tokens are drawn.
        branch: The branch.
        start: Index of the branch's first hidden state among the call's hidden states.
        prompt: The prompt, whose id keys the noise. No EOS is drawn before a template's last given token.
        canvas: The response so far; values at masked places are undefined.
        constraint: Which tokens may be drawn; ``None``: all tokens.
        guide: Distance from a hidden state to the hidden state of its unconditional logits, for classifier-free
            guidance.
        with_logprobs: Whether the reading gets log-probabilities.
        reading: Receives the result.
    """

    draw: Draw
    branch: Branch
    start: int
    prompt: Prompt
    canvas: Sequence[int]
    constraint: ConstraintState | None = None
    guide: int = 0
    with_logprobs: bool = False
    reading: Reading = field(default_factory=Reading)


Steps = Generator[Request, list[Reading], T]
"""A generator that yields requests, receives one reading per branch, and returns a ``T``."""
