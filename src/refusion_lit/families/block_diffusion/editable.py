"""Block diffusion that also learns to tell and correct wrong visible tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.families.block_diffusion.objective import BlockMasked
from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.noise import KeyedNoise
from refusion_lit.types import ModelTraits, SpecialTokens
from refusion_lit.utils.require import require, require_at_least, require_probability


@dataclass(frozen=True, kw_only=True)
class EditableBlockMasked(BlockMasked):
    """Block diffusion in which some visible tokens of the noisy copy are wrong, and are predicted too.

    As :class:`BlockMasked`, and: a share e of each sample's unmasked response tokens, uniform in [0, ``max_replaced``),
    is replaced by random other tokens, independently; the true token is the target there. A share of ``kept`` of the
    unmasked tokens that are right is predicted as well, so that the model learns to leave them alone. Terms: ``mdm`` as
    before; ``edit`` and ``keep``, means over their tokens.

    Source: the two streams of LLaDA2.1 (arXiv 2602.08676), mask-to-token and token-to-token. The report gives neither
    rates nor weights: those here are ours. Deliberate differences: wrong tokens are uniform ones only, where the report
    also feeds the model's own drafts (its multi-turn forward).

    Attributes:
        max_replaced: Upper end of the share of unmasked tokens that are replaced, in [0, 1].
        kept: Share of the right unmasked tokens that are targets, in [0, 1].
        edit_weight: Coefficient of the term ``edit``, at least 0.
        keep_weight: Coefficient of the term ``keep``, at least 0.
    """

    max_replaced: float = 0.1
    kept: float = 0.1
    edit_weight: float = 0.5
    keep_weight: float = 0.1

    def __post_init__(self) -> None:
        """Refuse options that cannot be trained with."""
        super().__post_init__()
        for name in ("max_replaced", "kept"):
            require_probability(f"objective.{name}", getattr(self, name))
        for name in ("edit_weight", "keep_weight"):
            require_at_least(f"objective.{name}", getattr(self, name), 0.0)
        for name in ("complementary", "shifted"):
            fix = "leave it out, or train with BlockMasked"
            require(not getattr(self, name), f"objective.{name}", "false with visible tokens as targets", True, fix)

    @property
    def traits(self) -> ModelTraits:
        """Block-causal attention; masks and visible tokens predict what belongs at their place."""
        return replace(super().traits, predictions=("mask", "visible"))

    @property
    def terms(self) -> Mapping[str, float]:
        """The masked-diffusion term, and those of wrong and of right visible tokens."""
        return {"mdm": 1.0, "edit": self.edit_weight, "keep": self.keep_weight}

    def corrupt(
        self,
        batch: ResponseBatch,
        noise: KeyedNoise,
        special_tokens: SpecialTokens,
        *,
        mask_ratio: Float[Tensor, " batch"] | None = None,
    ) -> CorruptedBatch:
        """Mask response tokens block by block, replace some others; see :meth:`Objective.corrupt`."""
        masked = super().corrupt(batch, noise, special_tokens, mask_ratio=mask_ratio)
        assert masked.is_masked is not None
        num_tokens = masked.input_ids.shape[1] // 2
        clean = masked.input_ids[:, num_tokens:]
        positions, ends = torch.arange(num_tokens, device=clean.device), batch.prompt_lengths + batch.response_lengths
        if self.fill_blocks_with == "eos":  # these are response tokens too
            ends = (ends + self.block_size - 1) // self.block_size * self.block_size
        in_response = (positions >= batch.prompt_lengths[:, None]) & (positions < ends[:, None])
        visible = in_response & ~masked.is_masked[:, :num_tokens]
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
    """Return uniformly drawn ids that differ from the given ones and that a decoder may produce.

    Args:
        tokens: Ids that are not to be drawn at their place.
        uniform: Numbers in [0, 1).
        special_tokens: Ids that are never drawn.
    """
    size, banned = special_tokens.vocab_size, special_tokens.banned_token_ids
    skipped = [torch.full_like(tokens, token) for token in banned]
    is_new = torch.stack([tokens != token for token in banned]).all(0) if banned else torch.ones_like(tokens).bool()
    skipped.append(tokens.where(is_new, size))  # a token that is skipped anyway takes no further id away
    num_left = size - len(banned) - is_new.long()
    drawn = (uniform * num_left).long()
    for column in torch.stack(skipped, -1).sort(-1).values.unbind(-1):
        drawn = drawn + (drawn >= column)
    return drawn
