"""LLaDA2.1 (arXiv 2602.08676): a block's tokens may be edited until the block is complete.

The decoder ``TokenEditing`` and the objective ``EditableBlockMasked``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.engine.branches import list_masked
from refusion_lit.engine.decoder import ModelRequirements, RowState, above_or_best
from refusion_lit.engine.requests import Branch, Confidence, Draw, Forward, Steps
from refusion_lit.families.block_diffusion.decoder import BlockDecoder
from refusion_lit.families.block_diffusion.objective import BlockMasked
from refusion_lit.families.llada.decoder import step_quota, warn_of_low_temperature
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.learning.objective import MaskRatio
from refusion_lit.modeling.devices import to_device
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class TokenEditing(BlockDecoder):
    """Decodes block by block; a forward fills masks in the block and replaces filled tokens that the model rejects.

    A forward reads all places of the block except prompt tokens and given tokens, which never change. It fills masks
    more probable than ``mask_threshold``, at least the most probable mask. It also replaces filled tokens if another
    token is more probable than ``edit_threshold``. A block without masks is edited in further forwards, at most 16,
    until a forward replaces nothing. Then the whole block is committed and never changes. Streaming and stop strings
    therefore see whole blocks. Blocks are counted from position 0, prompt included. Attention is block-causal, so
    complete blocks have an exact cache.

    Source: the ``generate`` of LLaDA2.1, with ``mask_threshold=0.7, edit_threshold=0.5`` in quality mode and
    ``mask_threshold=0.5, edit_threshold=0`` in speed mode. The pipeline of diffusers adds ``num_steps``, a higher
    ``max_post_steps`` (by 1), ``edit_threshold=1`` for None, and ``stop_in_block`` for ``eos_early_stop``. Deliberate
    differences: the first forward of the next block caches a block, which saves a forward per block; the mask token is
    never drawn; committed blocks are not edited again (the report's multi-block editing).

    Attributes:
        mask_threshold: Fill masks whose token is more probable (mask-to-token threshold), in [0, 1].
        edit_threshold: Replace a token by another token that is more probable than this (token-to-token threshold), in
            [0, 1]; the comparison is strict, so 1 replaces nothing.
        max_post_steps: Maximum number of forwards over a block without masks. It stops edits that undo each other.
        confidence: Distribution of probabilities: ``raw`` (softmax of the logits), ``filtered`` (after top-k and
            top-p), or ``tempered`` (after temperature, top-k and top-p, as in the programs of LLaDA2.1 and diffusers).
            At temperatures below 0.3, tempered probabilities round to 1: masks are filled from left to right, and any
            threshold is passed.
        min_num_filled: Fill at least this many masks per forward (``num_to_transfer`` in LLaDA2.1).
        num_steps: Steps per block (``num_inference_steps`` in diffusers). A forward fills at least the block divided by
            the steps. If the final step still fills masks, the block is not edited afterwards. ``None``: no limit.
        stop_at_eos: Stop after the first block with an EOS token, instead of making all blocks.
        stop_in_block: Stop inside a block, too, after a forward that writes an EOS token with no mask before it.

    >>> TokenEditing(mask_threshold=0.7, edit_threshold=0.5).max_post_steps
    16
    """

    requires = ModelRequirements(attention="block_causal", predictions=("mask", "visible"))

    ranges = {
        "mask_threshold": "[0, 1]",
        "edit_threshold": "[0, 1]",
        "max_post_steps": 0,
        "min_num_filled": 1,
        "num_steps": 1,
    }
    mask_threshold: float = 0.95
    edit_threshold: float = 0.9
    max_post_steps: int = 16
    confidence: Confidence = "raw"
    min_num_filled: int = 1
    num_steps: int | None = None
    stop_at_eos: bool = True
    stop_in_block: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_possible = self.stop_at_eos or not self.stop_in_block
        require(is_possible, "stop_in_block", "false with stop_at_eos: false", self.stop_in_block, "drop one of them")

    def check(self, sampling: SamplingParams) -> None:
        """Warn of tempered confidences at a low temperature."""
        if self.confidence == "tempered":
            warn_of_low_temperature(self, sampling)

    def step(self, state: RowState) -> Steps[None]:
        """Fill and edit a whole block, then commit it."""
        first = state.prompt_length + state.is_masked.index(True)
        start = first // self.block_size * self.block_size
        positions = list_masked(state, first, start + self.block_size)
        tokens: list[int | None] = [None] * len(positions)
        num_fills = num_post = 0
        statistic = None if self.confidence == "raw" else "probability"
        while None in tokens or num_post < self.max_post_steps:
            is_post = None not in tokens
            draw = Draw(
                sampling=state.sampling, round=state.num_forwards, statistic=statistic, confidence=self.confidence
            )
            branch = self._noisy_branch(state, positions, tokens)
            [reading] = yield Forward(phase="edit" if is_post else "denoise", branches=(branch,), draw=draw)
            state.num_cached = start
            masked = [i for i, token in enumerate(tokens) if token is None]
            probabilities = reading.statistic or reading.probabilities
            best = above_or_best([probabilities[i] for i in masked], self.mask_threshold, self._quota(num_fills))
            edited = [
                i for i, token in enumerate(tokens)
                if token not in (None, reading.tokens[i]) and probabilities[i] > self.edit_threshold
            ]  # fmt: skip
            written = [*edited, *(masked[j] for j in best)]
            for i in written:
                tokens[i] = reading.tokens[i]
            num_post += is_post
            num_fills += not is_post
            is_last = num_fills == self.num_steps and None not in tokens
            if (is_post and not edited) or is_last or (self.stop_in_block and self._ends(state, tokens, written)):
                break
        # Masks are left only if the text ends inside the block.
        final = [(position, token) for position, token in zip(positions, tokens, strict=True) if token is not None]
        state.commit([position - state.prompt_length for position, _ in final], [token for _, token in final])
        state.finished = True not in state.is_masked

    def _quota(self, num_fills: int) -> int:
        """Return the minimum number of masks to fill in a forward after ``num_fills`` others."""
        share = 0 if self.num_steps is None else step_quota(self.block_size, self.num_steps, num_fills)
        return max(share, self.min_num_filled)

    def _ends(self, state: RowState, tokens: Sequence[int | None], written: Sequence[int]) -> bool:
        """Return whether a forward wrote an EOS token, and no mask is left before the first EOS token."""
        ends = [i for i, token in enumerate(tokens) if token in state.special_tokens.eos_token_ids]
        is_new = any(i in ends for i in written)
        return is_new and None not in tokens[: ends[0]]

    def _noisy_branch(self, state: RowState, masked: Sequence[int], tokens: Sequence[int | None]) -> Branch:
        """Return the text from the end of the cache to the block's end, with the tokens filled so far."""
        branch = self._branch(state, (masked[0] // self.block_size + 1) * self.block_size, masked)
        text = list(branch.tokens)
        for position, token in zip(masked, tokens, strict=True):
            if token is not None:
                text[position - state.num_cached] = token
        return replace(branch, tokens=text)


@dataclass(frozen=True, kw_only=True)
class EditableBlockMasked(BlockMasked):
    """Block diffusion that also learns to correct wrong visible tokens in the noisy copy.

    Like :class:`BlockMasked`, with two additions. First, unmasked response tokens are replaced by random other tokens,
    independently; their share is uniform in [0, ``max_replaced``), by sample, and the target is the true token. Second,
    a share ``kept`` of the right unmasked tokens is predicted as well, so that the model learns to leave right tokens
    alone. Terms: ``mdm`` as in :class:`BlockMasked`; ``edit`` and ``keep``, means over wrong and right tokens.

    Source: the streams mask-to-token and token-to-token of LLaDA2.1 (arXiv 2602.08676). The report gives neither rates
    nor weights; the defaults are ours. Deliberate difference: wrong tokens are uniform, while the report also feeds
    the model's drafts (multi-turn forward).

    Attributes:
        max_replaced: Upper end of the share of unmasked tokens that are replaced, in [0, 1].
        kept: Share of right unmasked tokens that are targets, in [0, 1].
        edit_weight: Coefficient of the term ``edit``, at least 0.
        keep_weight: Coefficient of the term ``keep``, at least 0.

    >>> EditableBlockMasked(block_size=4).terms
    {'mdm': 1.0, 'edit': 0.5, 'keep': 0.1}
    """

    ranges = {"max_replaced": "[0, 1]", "kept": "[0, 1]", "edit_weight": 0.0, "keep_weight": 0.0}
    max_replaced: float = 0.1
    kept: float = 0.1
    edit_weight: float = 0.5
    keep_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("complementary", "shifted"):
            fix = "leave it out, or train with BlockMasked"
            require(not getattr(self, name), f"objective.{name}", "false with visible tokens as targets", True, fix)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; masks and visible tokens predict the right token at their position."""
        return replace(super().traits, predictions=("mask", "visible"))

    @property
    def terms(self) -> Mapping[str, float]:
        """The terms for masks, wrong visible tokens and right visible tokens."""
        return {"mdm": 1.0, "edit": self.edit_weight, "keep": self.keep_weight}

    def corrupt(
        self, batch: ResponseBatch, noise: KeyedNoise, special_tokens: SpecialTokens, *, mask_ratio: MaskRatio = None
    ) -> CorruptedBatch:
        """Mask response tokens block by block, replace some others; see :meth:`Objective.corrupt`."""
        masked = super().corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
        assert masked.is_masked is not None
        num_tokens = masked.input_ids.shape[1] // 2
        clean = masked.input_ids[:, num_tokens:]
        whole = replace(batch, input_ids=clean)
        if self.fill_blocks_with == "eos":  # response tokens, too
            whole.response_lengths = batch.response_lengths + (-batch.ends) % self.block_size
        visible = whole.in_response & ~masked.is_masked[:, :num_tokens]
        share = self.max_replaced * noise.uniform("replaced_share", 1)
        is_replaced = visible & (noise.uniform("replaced", num_tokens) < share)
        is_kept = visible & ~is_replaced & (noise.uniform("kept", num_tokens) < self.kept)
        others = other_tokens(clean, noise.uniform("replacement", num_tokens), special_tokens)

        is_target = F.pad(is_replaced | is_kept, (0, num_tokens))
        terms = F.pad(is_replaced.long() + 2 * is_kept, (0, num_tokens))
        counts = torch.stack((is_replaced.sum(), is_kept.sum())).to(masked.counts.dtype)
        return replace(
            masked,
            input_ids=torch.cat((others.where(is_replaced, masked.input_ids[:, :num_tokens]), clean), 1),
            labels=torch.where(is_target, torch.cat((clean, clean), 1), masked.labels),
            weights=torch.where(is_target, 1.0, masked.weights),
            terms=terms,
            counts=torch.cat((masked.counts, counts)),
        )


def other_tokens(
    tokens: Int[Tensor, "batch token"], uniform: Float[Tensor, "batch token"], special_tokens: SpecialTokens
) -> Int[Tensor, "batch token"]:
    """Draw uniform ids that differ from the given ids and that a decoder may produce.

    Args:
        tokens: Ids to avoid, by position.
        uniform: Random numbers in [0, 1).
        special_tokens: Special ids, which are never drawn.
    """
    banned = to_device(list(special_tokens.banned_token_ids), tokens.device)
    num_before = torch.searchsorted(banned, tokens.contiguous())
    is_allowed = torch.searchsorted(banned, tokens.contiguous(), right=True) == num_before
    num_drawable = special_tokens.vocab_size - len(banned) - is_allowed.long()
    # The draw is an index into the allowed ids in ascending order: skip the given id, then the banned ids.
    drawn = (uniform * num_drawable).long()
    drawn = drawn + (is_allowed & (drawn >= tokens - num_before))
    return drawn + torch.searchsorted(banned - torch.arange(len(banned), device=tokens.device), drawn, right=True)
