"""Fast-dLLM: faster decoding of LLaDA and Dream by confidence thresholds and an approximate KV cache.

Source: arXiv 2505.22618 and its released code. Deliberate difference: the factor rule is the paper's; the released code
accepts an additional token when its scan reaches the last candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from refusion_lit.engine.branches import rounds_since, text_branch
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, most_certain
from refusion_lit.engine.requests import Branch, Confidence, Draw, Forward, Steps
from refusion_lit.families.llada.decoder import STATISTIC, paced_steps, step_quota, time_share, warn_of_low_temperature
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class FastDLLM(Decoder):
    """Unmasks a block's confident tokens in parallel, block by block, on a bidirectional model.

    The caches are approximate: with bidirectional attention a token's KV cache entries depend on later tokens. At the
    start of every block, a forward over the whole canvas refreshes the cache.

    Attributes:
        block_length: Tokens per block; the last block may be shorter. ``None``: a single block, as in Dream's version
            without a cache.
        threshold: Unmask tokens with at least this confidence, and always the most confident token. At least 0. A value
            above 1 unmasks a token per forward; 1 may unmask more, because confidences may round to 1.
        factor: Alternative to a threshold: unmask the n most confident tokens while (j + 1)(1 - c_j) <= factor for
            j = 1, ..., n; at least the most confident token.
        steps: Without threshold and factor: number of forwards for the whole response, divided equally among the
            blocks; at most a forward per token. ``None``: as many as tokens. With a threshold (Dream's version without
            a cache): a step may unmask the response divided by the steps, plus the rest that earlier steps left. From
            the last step on, all tokens that reach the threshold are unmasked.
        order: Definition of confidence. ``low_confidence``: the token's probability (LLaDA). ``maskgit_plus``: the
            probability after temperature, top-p and top-k (Dream with a threshold, ``alg`` ``confidence_threshold``).
            ``entropy``: the negative entropy of the filtered distribution, on Dream's time schedule inside a block
            (Dream with a cache and any other ``alg``); needs ``threshold`` null.
        confidence: Distribution by which ``maskgit_plus`` and ``entropy`` rank masks: ``raw`` (softmax of the logits),
            ``filtered`` (after top-p and top-k), or ``tempered`` (after temperature, top-p and top-k, as in the
            authors' program). At temperatures below 0.3, tempered confidences round to 1: masks are unmasked from left
            to right, and any threshold is passed.
        cache: ``none``; ``prefix`` (tokens before the block are cached; the block and later tokens are recomputed); or
            ``dual`` (only the block is recomputed).
        stop_at_eos: Stop once all tokens up to an EOS token are final.
        shifted: The model predicts a mask at the position before it (Dream). With a cache, a block's first forward then
            unmasks only the block's first token, because its predictor is outside the block.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/published/models/llada-tiny")
    >>> decoder = FastDLLM(block_length=16, threshold=0.8, cache="dual")
    >>> [answer] = model.generate(["12+34,56+78>"], decoder=decoder, max_new_tokens=32)
    >>> answer.text, answer.num_tokens, answer.num_forwards
    ('12+34=91;77+88=104;', 20, 11)
    """

    requires = ModelRequirements(attention="bidirectional", predictions=("mask",))
    refuses = None  # given tokens are unmasked tokens of the canvas

    ranges = {"block_length": 1, "threshold": 0.0, "factor": 0.0, "steps": 1}
    block_length: int | None = 32
    threshold: float | None = 0.9
    factor: float | None = None
    steps: int | None = None
    order: Literal["low_confidence", "maskgit_plus", "entropy"] = "low_confidence"
    confidence: Confidence = "filtered"
    cache: Literal["none", "prefix", "dual"] = "none"
    stop_at_eos: bool = False
    shifted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        has_choice = self.order in STATISTIC or self.confidence == "filtered"
        require(has_choice, "confidence", f"filtered, the only confidence of order {self.order!r}", self.confidence,
                "leave it out, or choose order 'maskgit_plus' or 'entropy'")  # fmt: skip
        if self.factor is not None:
            require(self.threshold is None, "factor", "null with a threshold", self.factor, "set threshold to null")
        has_rule = self.threshold is not None or self.factor is not None
        is_scheduled = self.order == "entropy" and has_rule
        require(not is_scheduled, "order", "no entropy with a threshold or factor", self.order, "set both to null")
        if self.steps is not None:
            require(self.factor is None, "steps", "null with a factor", self.steps, "set factor to null")
            is_dream = self.threshold is None or (self.block_length is None and self.cache == "none")
            require(is_dream, "steps", "null with a threshold, unless block_length is null and cache none", self.steps,
                    "set threshold to null")  # fmt: skip

    def check(self, sampling: SamplingParams) -> None:
        """Refuse steps that the blocks cannot share equally."""
        if self.order in STATISTIC and self.confidence == "tempered":
            warn_of_low_temperature(self, sampling)
        if self.steps is None:
            return
        length = sampling.max_new_tokens
        if self.threshold is not None:
            require(self.steps <= length, "steps", f"at most max_new_tokens ({length})", self.steps, "use fewer steps")
            return
        block_length = self.block_length or length
        num_blocks = -(-length // block_length)
        require(self.steps % num_blocks == 0, "steps", f"a multiple of the {num_blocks} blocks", self.steps,
                f"set steps to {-(-self.steps // num_blocks) * num_blocks}, say")  # fmt: skip
        two = self._first_is_alone and min(block_length, length) > 1
        require(not two or self.steps >= 2 * num_blocks, "steps",
                f"at least {2 * num_blocks}, two per block, as shifted with a cache takes a step for the first token",
                self.steps, "use more steps")  # fmt: skip

    def begin(self, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> RowState:
        """Create a canvas as long as the longest response."""
        state = RowState(prompt, sampling, special_tokens)
        if self.order == "entropy":  # early steps of its time schedule may unmask nothing
            nominal, per_block = self._pace(sampling)
            num_blocks = -(-len(state.tokens) // nominal)
            state.schedule_length = num_blocks * (max(nominal, per_block) + 1)
        return state

    def _pace(self, sampling: SamplingParams) -> tuple[int, int]:
        """Return a block's numbers of tokens and steps, without given tokens."""
        nominal = self.block_length or sampling.max_new_tokens
        return nominal, nominal if self.steps is None else self.steps // -(-sampling.max_new_tokens // nominal)

    @property
    def _first_is_alone(self) -> bool:
        """Whether a block's first forward unmasks only its first token, whose predictor later forwards lack."""
        return self.shifted and self.cache != "none"

    def step(self, state: RowState) -> Steps[None]:
        """Run a forward and unmask the block's confident tokens."""
        length = len(state.tokens)
        size = self.block_length or length
        start = state.is_masked.index(True) // size * size
        block = range(start, min(start + size, length))
        places = [place for place in block if state.is_masked[place]]
        number = rounds_since(state, start)  # this forward's number in the block, from 0
        lone_first = self._first_is_alone and number == 0 and places[0] == start
        if lone_first:
            places = places[:1]
        is_cached = self.cache != "none"
        is_whole = number == 0 or not is_cached
        draw = Draw(
            sampling=state.sampling,
            round=state.num_forwards,
            statistic=STATISTIC.get(self.order),
            confidence=self.confidence,
            top_p_first=self.order in STATISTIC,
        )
        [reading] = yield Forward(
            phase="refresh" if is_cached and is_whole else "denoise",
            branches=(self._branch(state, places, block, is_whole=is_whole),),
            draw=draw,
            cached=is_cached,
        )
        confidences = reading.statistic or reading.probabilities
        chosen = [0] if lone_first else self._choose(state, confidences, block, number)
        state.commit([places[i] for i in chosen], [reading.tokens[i] for i in chosen])
        state.finished = not any(state.is_masked)

    def _branch(self, state: RowState, places: Sequence[int], block: range, *, is_whole: bool) -> Branch:
        """Return a round's branch: the whole canvas, the block with later tokens, or the block alone."""
        length = state.prompt_length + len(state.tokens)
        first = 0 if is_whole else state.prompt_length + block.start
        last = length if is_whole or self.cache == "prefix" else state.prompt_length + block.stop
        predicted = [state.prompt_length + place for place in places]
        branch = text_branch(state, first, last, predicted, order=[0] * (last - first), shift=int(self.shifted))
        return replace(branch, visible=((0, first), (last, length)))

    def _choose(self, state: RowState, confidences: Sequence[float], block: range, number: int) -> list[int]:
        """Return the indices of the masks to unmask in a forward.

        Args:
            state: The prompt's state.
            confidences: Confidences of the block's masks.
            block: Places of the block.
            number: Number of the block's forward, from 0.
        """
        ranked = most_certain(confidences)
        if self.threshold is not None:
            allowed = ranked[: self._allowance(state, number)]
            return [i for n, i in enumerate(allowed) if n == 0 or confidences[i] >= self.threshold]
        if self.factor is not None:
            count = 1
            while count < len(ranked) and confidences[ranked[count]] >= 1 - self.factor / (count + 2):
                count += 1
            return ranked[:count]
        given = [token is not None for token in state.prompt.given[block.start : block.stop]]
        num_masks = len(block) - sum(given)
        done = int(self._first_is_alone and not any(given[:1]))
        nominal, num_steps = self._pace(state.sampling)
        if self.steps is None:
            num_steps = num_masks
        elif any(given):  # fewer, at the same pace
            num_steps = max(paced_steps(num_masks, num_steps, nominal), 1 + done)
        if self.order == "entropy":
            return ranked[: int(len(ranked) * time_share(number, num_steps))]
        # A step that unmasked the first token alone does not count.
        num_steps = min(num_steps, num_masks)
        return ranked[: step_quota(num_masks - done, num_steps - done, number - done)]

    def _allowance(self, state: RowState, number: int) -> int | None:
        """Return how many masks a step with a threshold may unmask; ``None`` for all of the block."""
        if self.steps is None or number >= self.steps - 1:
            return None
        num_masks = len(state.tokens) - state.prompt.num_given
        return max(num_masks // self.steps, 1) * (number + 1) - state.num_committed
