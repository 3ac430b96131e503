"""LLaDA and Dream: a fixed canvas of masks, unmasked step by step with bidirectional attention.

Sources: the papers and released samplers of LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487). Deliberate
differences: the state, not the token ids, records which places are masked; mask and padding ids are never drawn; ties
go to the lower position; quotas are counted by row, never pooled over a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from refusion_lit.engine.branches import text_branch
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.engine.requests import Branch, Confidence, Draw, Forward, Reading, Statistic, Steps
from refusion_lit.noise import uniform_scalar
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require

STATISTIC: dict[str, Statistic] = {
    "maskgit_plus": "probability",
    "topk_margin": "margin",
    "entropy": "negative_entropy",
}
"""The statistic that ranks masks, by Dream's name for the order; see ``LLaDA.order``."""
_DREAM = ("origin", *STATISTIC)
_END = 1e-3
"""Time at the end of Dream's schedule."""
_LOW_TEMPERATURE = 0.3
"""Below this temperature, most probabilities after temperature round to 1, and no longer rank masks."""


@dataclass(kw_only=True)
class LLaDAState(RowState):
    """State of LLaDA.

    Attributes:
        schedule: For every step, its block and its quota of masks (Dream's orders ignore the quota). A block without
            masks has no steps.
    """

    schedule: list[tuple[range, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LLaDA(Decoder):
    """Unmasks the most confident tokens in a fixed number of steps.

    As in the released sampler, all steps run, even if nothing is left to unmask. In a block with given tokens, the
    number of steps shrinks in proportion to its masks.

    Attributes:
        steps: Number of forwards over the whole response; ``None``: as many as tokens.
        block_length: Tokens per block; blocks are unmasked left to right. ``None``: a single block.
        order: Masks to unmask first (``remasking`` in LLaDA, ``alg`` in Dream). LLaDA: ``low_confidence`` (the most
            probable draft first) or ``random``. Dream: ``origin`` (masks by chance), ``maskgit_plus`` (highest
            probability), ``topk_margin`` (greatest distance between the two highest probabilities) or ``entropy``
            (lowest entropy). Dream's orders follow a time schedule: early steps may unmask nothing, the last step
            unmasks the rest.
        confidence: Distribution by which ``maskgit_plus``, ``topk_margin`` and ``entropy`` rank masks: ``raw`` (softmax
            of the logits), ``filtered`` (after top-p and top-k, also at temperature 0), or ``tempered`` (after
            temperature, top-p and top-k, as in Dream's program). At temperatures below 0.3, tempered confidences round
            to 1, and masks are unmasked from left to right.
        guidance_scale: Classifier-free guidance weight w (``cfg_scale`` in LLaDA) in l_u + (w + 1)(l_c - l_u). The
            unconditional branch sees a masked prompt and shares the forward. 0: no guidance.
        forbid_eos: Never draw the tokenizer's end-of-sequence token (``logits_eos_inf`` in LLaDA), and leave it out of
            the confidences. Other EOS tokens, such as the end of a turn, may be drawn.
        eos_confidence_zero: With ``low_confidence``: an EOS token may be drawn, but its confidence is 0, so that it is
            unmasked only if no other place is left. Other tokens' confidences are renormalised without EOS tokens
            (``confidence_eos_eot_inf`` in LLaDA). Above temperature 0, the released option acts on the end of turn
            only; here it acts on all EOS tokens.
        stop_at_eos: Stop once all tokens up to an EOS token are final, instead of running all steps.
        shifted: The model predicts a mask at the position before it (Dream).

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published/models/llada-tiny")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=LLaDA(steps=8), max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=40;77+87=104;', 20, 8)
    """

    requires = ModelRequirements(attention="bidirectional", predictions=("mask",))
    refuses = None  # given tokens are unmasked tokens of the canvas

    ranges = {"steps": 1, "block_length": 1, "guidance_scale": "[0, inf)"}
    steps: int | None = None
    block_length: int | None = None
    order: Literal["low_confidence", "random", "origin", "maskgit_plus", "topk_margin", "entropy"] = "low_confidence"
    confidence: Confidence = "filtered"
    guidance_scale: float = 0.0
    forbid_eos: bool = False
    eos_confidence_zero: bool = False
    stop_at_eos: bool = False
    shifted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_length is not None:
            require(self.order not in _DREAM, "block_length", f"null with order {self.order!r}, which has no blocks",
                    self.block_length, "leave it out, or choose another order")  # fmt: skip
        has_choice = self.order in STATISTIC or self.confidence == "filtered"
        require(has_choice, "confidence", f"filtered, the only confidence of order {self.order!r}", self.confidence,
                f"leave it out, or choose an order of {', '.join(STATISTIC)}")  # fmt: skip
        require(not self.eos_confidence_zero or self.order == "low_confidence", "eos_confidence_zero",
                f"false with order {self.order!r}, which ranks masks otherwise", self.eos_confidence_zero,
                "leave it out, or choose order 'low_confidence'")  # fmt: skip

    def check(self, sampling: SamplingParams) -> None:
        """Require blocks that divide the response, and steps that divide into blocks."""
        if self.order in STATISTIC and self.confidence == "tempered":
            warn_of_low_temperature(self, sampling)
        length = sampling.max_new_tokens
        block = self.block_length or length
        require(length % block == 0, "block_length", f"a divisor of max_new_tokens ({length})", block,
                "set block_length to null for a single block")  # fmt: skip
        num_blocks = length // block
        steps = self.steps or length
        require(steps % num_blocks == 0, "steps", f"a multiple of the {num_blocks} blocks", steps, "leave it out")

    def adapt_to(self, sampling: SamplingParams) -> LLaDA:
        """Return the decoder with blocks that fill the response: as long as possible, at most ``block_length``."""
        length = sampling.max_new_tokens
        if self.block_length is None or length % self.block_length == 0:
            return self
        return replace(self, block_length=max(n for n in range(1, self.block_length) if length % n == 0))

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> LLaDAState:
        """Create a canvas as long as the longest response, and its schedule."""
        state = LLaDAState(prompt, sampling, special_tokens)
        length = len(state.tokens)
        nominal = self.block_length or sampling.max_new_tokens
        per_block = (self.steps or sampling.max_new_tokens) // (sampling.max_new_tokens // nominal)
        for start in range(0, length, self.block_length or length):
            block = range(start, min(start + (self.block_length or length), length))
            num_masks = state.is_masked[block.start : block.stop].count(True)
            num_steps = paced_steps(num_masks, per_block, nominal)
            state.schedule += [(block, step_quota(num_masks, num_steps, number)) for number in range(num_steps)]
        state.schedule_length = len(state.schedule)
        return state

    def step(self, state: LLaDAState) -> Steps[None]:  # type: ignore[override]
        """Run a forward over the whole canvas and unmask the step's quota of tokens."""
        number = state.num_forwards  # the step's number, from 0
        block, _ = state.schedule[number]
        places = [place for place in block if state.is_masked[place]]
        eos = state.special_tokens.eos_token_ids
        forbidden = eos[:1] if self.forbid_eos else ()
        draw = Draw(
            sampling=state.sampling,
            round=number,
            forbidden=forbidden,
            guidance=self.guidance_scale or None,
            confidence_forbidden=eos if self.eos_confidence_zero else forbidden,
            statistic=STATISTIC.get(self.order),
            confidence=self.confidence,
            top_p_first=self.order in _DREAM,
        )
        readings = yield Forward(phase="denoise", branches=self._branches(state, places), draw=draw, cached=False)
        chosen = self._choose(state, places, readings[0], number)
        state.commit([places[i] for i in chosen], [readings[0].tokens[i] for i in chosen])
        state.finished = number + 1 == state.schedule_length

    def _branches(self, state: RowState, places: Sequence[int]) -> tuple[Branch, ...]:
        start = state.prompt_length
        stop = start + len(state.tokens)
        drawn = [start + place for place in places]
        branch = text_branch(state, 0, stop, drawn, order=[0] * stop, shift=int(self.shifted))
        if self.guidance_scale == 0:
            return (branch,)
        unconditional = [state.mask_token_id] * start + list(branch.tokens[start:])
        return branch, replace(branch, tokens=unconditional, draft_at=())

    def _choose(self, state: LLaDAState, places: Sequence[int], reading: Reading, number: int) -> list[int]:
        """Return the indices into ``places`` to unmask in step ``number``, counted from 0."""
        if self.order in _DREAM:  # a share of the remaining masks; in the last step all
            share = time_share(number, state.schedule_length)
            if self.order == "origin":
                return [i for i, place in enumerate(places) if self._chance(state, number, place) < share]
            return most_certain(reading.statistic, int(len(places) * share))
        confidences = reading.probabilities
        if self.order == "random":
            confidences = [self._chance(state, number, place) for place in places]
        return most_certain(self.weigh(state, places, confidences), state.schedule[number][1])

    def weigh(self, state: RowState, places: Sequence[int], confidences: Sequence[float]) -> Sequence[float]:  # noqa: ARG002
        """Return the confidences that rank masks; a subclass may change them."""
        return confidences

    def _chance(self, state: RowState, number: int, place: int) -> float:
        return uniform_scalar("order", state.sampling.seed, state.prompt.id, number, place)


def warn_of_low_temperature(decoder: Decoder, sampling: SamplingParams) -> None:
    """Warn about a temperature at which a decoder's tempered confidences round to 1.

    Equal confidences leave masks in text order, and confidences of 1 pass any threshold.
    """
    if 0 < sampling.temperature < _LOW_TEMPERATURE:
        warnings.warn(
            f"{type(decoder).__name__} ranks masks by confidences after temperature (confidence: tempered). At "
            f"temperature {sampling.temperature:g}, most of them round to 1: masks are unmasked from left to right, "
            "and thresholds pass more tokens. Set confidence: filtered, or raw, to rank without the temperature.",
            stacklevel=3,
        )


def step_quota(num_masks: int, num_steps: int, step: int) -> int:
    """Return how many of a block's masks a step unmasks: shares are as equal as possible, larger shares first."""
    return num_masks // num_steps + (step < num_masks % num_steps)


def paced_steps(num_masks: int, num_steps: int, block_length: int) -> int:
    """Return the number of steps for ``num_masks`` at the pace of ``num_steps`` steps for ``block_length`` masks."""
    return -(-num_masks * num_steps // block_length)


def time_share(step: int, num_steps: int) -> float:
    """Return which share of the remaining masks a step in Dream's schedule unmasks; 1 in the last step.

    Time runs linearly from 1 to 0.001, the program's ``eps``.

    Args:
        step: Step number, from 0.
        num_steps: Number of steps.
    """
    if step >= num_steps - 1:
        return 1.0
    time, after = (1 - i / num_steps * (1 - _END) for i in (step, step + 1))
    return 1 - after / time
