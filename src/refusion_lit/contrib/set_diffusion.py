"""Set diffusion (arXiv 2607.01775): causal attention over decoded tokens; masks do not see other masks.

``SetDiffusion`` is the decoder: it reads a sliding window of masks. ``StaggeredSets`` is the objective: it orders the
response at random, roughly from left to right, and predicts every token from a separate mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.branches import list_uncached
from refusion_lit.engine.decoder import Decoder, ModelRequirements, RowState, above_or_best
from refusion_lit.engine.requests import Branch, Draw, Forward, Steps
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio, Objective, mask_probability, required_mask_id
from refusion_lit.learning.text_order import extend_responses, text_then_masks
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require_at_least


@dataclass(frozen=True, kw_only=True)
class SetDiffusion(Decoder):
    """Decodes a set of tokens per forward, chosen by confidence among the first masks in the text.

    A forward feeds the last forward's new tokens, causally and in text order after the cache. It also feeds the masks
    within ``window_size`` positions from the first mask. A mask sees the cache, the new tokens and itself, but no other
    mask. The cache entries of the new tokens are exact and final, because they do not depend on tokens decoded later. A
    forward commits every mask that is at least as probable as ``threshold``, and always the ``quota`` most probable
    masks. Then the window moves to the first remaining mask.

    Source: SetDLM (arXiv 2607.01775) and the released program, ``predict_and_noise`` with the leftmost window.
    Deliberate differences: prompt and first window share a forward; the option is a quota, not a number of steps;
    probabilities come from the unfiltered softmax, not after top-p; a response ends as soon as all tokens up to an EOS
    token are decoded, not every ``window_size`` forwards. Not implemented: orders drawn before decoding, and
    ``posterior`` sampling.

    Attributes:
        window_size: Maximum number of masks in a forward, W (``max_window_size``), at least 1.
        threshold: Commit every mask whose token is at least this probable, in [0, 1]; ``None``: only the quota.
        quota: Minimum number of tokens committed per forward, at least 1 (response length / ``num_steps``).

    >>> from refusion_lit.decoding import default_decoder
    >>> default_decoder(StaggeredSets().traits)
    SetDiffusion(window_size=16, threshold=0.9, quota=1)
    """

    requires = ModelRequirements(attention="causal", predictions=("isolated_mask",))
    shares = "all"
    refuses = None  # given tokens are cached after the prompt, as if they had been decoded first

    ranges = {"window_size": 1, "threshold": "[0, 1]", "quota": 1}
    window_size: int = 16
    threshold: float | None = 0.9
    quota: int = 1

    def step(self, state: RowState) -> Steps[None]:
        """Run one forward over new tokens and the masks in the window, and commit some masks."""
        first = state.is_masked.index(True)
        window = range(first, min(first + self.window_size, len(state.tokens)))
        active = [place for place in window if state.is_masked[place]]
        branches = self._branches(state, active)
        draw = Draw(sampling=state.sampling, round=state.num_forwards)
        readings = yield Forward(phase="denoise", branches=branches, draw=draw, packed=True)
        read = readings[-len(active) :]
        state.num_cached = state.prompt_length + state.prompt.num_given + state.num_committed
        probabilities = [reading.probabilities[0] for reading in read]
        threshold = math.inf if self.threshold is None else self.threshold
        chosen = above_or_best(probabilities, threshold, self.quota, is_inclusive=True)
        state.commit([active[i] for i in chosen], [read[i].tokens[0] for i in chosen])

    def _branches(self, state: RowState, active: list[int]) -> tuple[Branch, ...]:
        """Return a branch of the tokens that are not cached, if there are any, and a branch per mask."""
        start = state.num_cached
        new = list_uncached(state)
        tokens, positions = [token for token, _ in new], [position for _, position in new]
        clean = Branch(tokens=tokens, positions=positions, visible=((0, start),), write_at=start)
        known = start + len(clean.tokens)
        masks = [
            Branch(
                tokens=(state.mask_token_id,),
                positions=(state.prompt_length + place,),
                visible=((0, known),),
                write_at=known + i,
                draft_at=(0,),
            )
            for i, place in enumerate(active)
        ]
        return (clean, *masks) if clean.tokens else tuple(masks)


@dataclass(frozen=True, kw_only=True)
class StaggeredSets(Objective):
    """Predicts response tokens in a random order, roughly from left to right; every token is a target.

    Source: SetDLM (arXiv 2607.01775), training in a single forward. Staggered noise orders the response
    (:func:`staggered_times`); tokens that are ``reach`` or more apart keep their text order. A row holds the prompt,
    the response in the drawn order, and a mask per response token in the same order; position ids give the positions in
    the text. A clean token sees earlier clean tokens and itself. A mask sees itself and the clean tokens before its
    target, but no other mask. The only term, ``nll``, is the mean cross-entropy over the masks in a sample, then the
    mean over samples: the exact negative log-likelihood per token in the drawn order.

    Deliberate differences: only ``set_size`` and ``reach`` determine the shape of the noise, as by default in the
    released program; N is the length of the response, not of the context; ``pad_responses_to`` replaces padding to the
    context length.

    Attributes:
        set_size: Set size d that the noise imitates, at least 1; 1 is left to right.
        reach: Tokens this far apart keep their order, D (``max_block_size``), at least ``set_size``. The order is
            uniform if ``reach`` equals ``set_size`` and is at least the response length.
        pad_responses_to: Lengthen responses with EOS tokens to a multiple of this number, so that the decoding
            window may reach beyond the answer; ``None``: no lengthening.

    >>> from refusion_lit.learning.batch import ResponseBatch
    >>> from refusion_lit.noise import KeyedNoise
    >>> from refusion_lit.types import SpecialTokens
    >>> special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=19)
    >>> batch = ResponseBatch.from_pairs([([5], [6, 7, 8])])
    >>> corrupted = StaggeredSets(set_size=1).corrupt(batch, KeyedNoise(batch.sample_keys), special)
    >>> corrupted.input_ids, corrupted.position_ids
    (tensor([[5, 6, 7, 8, 2, 2, 2]]), tensor([[0, 1, 2, 3, 1, 2, 3]]))
    """

    trained = ModelTraits(attention="causal", predictions=("isolated_mask",))
    """Causal attention in sequence order; masks predict themselves and see no other mask."""

    term = "nll"
    ranges = {"set_size": 1, "pad_responses_to": 1}
    set_size: int = 8
    reach: int = 16
    pad_responses_to: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("objective.reach", self.reach, self.set_size)

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Order the responses and append masks; see :meth:`Objective.corrupt`. A ``mask_ratio`` has no effect."""
        mask_token_id = required_mask_id(self, special_tokens)
        mask_probability(noise, 0.0, mask_ratio)  # refuses impossible ratios, as all objectives do
        multiple = self.pad_responses_to or 1
        lengths = (batch.response_lengths + multiple - 1) // multiple * multiple
        sizes = torch.stack(((batch.prompt_lengths + lengths).max(), lengths.max()))
        width, num_masks = sizes.cpu().tolist()  # a single transfer
        batch = extend_responses(batch, lengths, special_tokens, width=width)
        positions = batch.positions
        num_tokens = len(positions)
        starts = batch.prompt_lengths[:, None]
        uniform = noise.uniform("masking_time", num_tokens).gather(1, (positions - starts).clamp(min=0))
        times = staggered_times(positions - starts, lengths[:, None], uniform, self.set_size, self.reach)
        times = torch.where(batch.in_response, times, torch.where(positions < starts, torch.inf, -torch.inf))
        order = times.argsort(dim=1, descending=True, stable=True)
        clean = batch.input_ids.gather(1, order)

        # The mask for the response token with rank r stands at index r after the clean tokens.
        rank = torch.arange(num_masks, device=clean.device).expand(len(clean), -1)
        is_mask = rank < lengths[:, None]
        source = (starts + rank).clamp(max=num_tokens - 1)
        masks = torch.full_like(rank, mask_token_id).where(is_mask, special_tokens.pad_token_id)
        labels = clean.gather(1, source).where(is_mask, IGNORE_INDEX)
        weights = (1 / lengths.double())[:, None].expand_as(rank).where(is_mask, 0.0)
        joined = torch.cat((clean, masks), 1)
        return CorruptedBatch(
            input_ids=joined,
            position_ids=torch.cat((order, order.gather(1, source).where(is_mask, num_tokens)), 1),
            labels=F.pad(labels, (num_tokens, 0), value=IGNORE_INDEX),
            weights=F.pad(weights.float(), (num_tokens, 0)),
            terms=torch.zeros_like(joined),
            counts=weights.new_full((1,), len(joined)).float(),
            visible=text_then_masks(num_tokens, (starts + rank).where(is_mask, 0), torch.zeros_like(rank)),
            is_masked=F.pad(is_mask, (num_tokens, 0)),
            is_real=torch.cat((batch.is_real, is_mask), 1),
        )


def staggered_times(
    place: Int[Tensor, "batch token"],
    length: Int[Tensor, "batch 1"],
    uniform: Float[Tensor, "batch token"],
    set_size: int,
    reach: int,
) -> Float[Tensor, "batch token"]:
    """Draw the times at which tokens are masked, in [0, 1]; the decoding order is from latest to earliest.

    SetDLM (arXiv 2607.01775): token i among N is masked at T = o + b (1 - (1 - u)^(1 / k)) with the offset
    o = (1 - b) (N - 1 - i) / (N - 1), so that T lies in [o, o + b]. With set size d and reach D, at most N,
    b = D / (N + D - 1) and k = A / (b - A) where A = d / (2 N); if d is 1 or D, k = 1 and b = 2 A.

    Args:
        place: i, the place in the response; times at places outside [0, N) are meaningless.
        length: N, the response length.
        uniform: u, in [0, 1).
        set_size: d.
        reach: D.
    """
    number = length.double()
    size = number.clamp(max=set_size)
    span = number.clamp(max=reach)
    area = size / (2 * number)
    is_plain = (size == 1) | (size == span)
    width = torch.where(is_plain, 2 * area, span / (number + span - 1))
    power = (width - area) / area  # 1 / k
    offset = (1 - width) * (number - 1 - place) / (number - 1).clamp(min=1)
    return offset + width * -torch.expm1(power * torch.log1p(-uniform))
