"""Research extras, a plugin that the core never imports; see README.md in this folder."""

from refusion_lit.contrib.apd import APD
from refusion_lit.contrib.card import CARD, SoftTail
from refusion_lit.contrib.d2f import D2F, DiffusionForcing
from refusion_lit.contrib.r2ft import R2FT, Convolutional
from refusion_lit.contrib.rl import GroupPolicy
from refusion_lit.contrib.set_diffusion import SetDiffusion, StaggeredSets
from refusion_lit.contrib.slot_search import SlotSearch
from refusion_lit.families.defaults import register_decoder
from refusion_lit.types import ModelTraits


def _fits_card(traits: ModelTraits) -> bool:
    """Return whether attention is causal and masks predict the next token only."""
    predictions = {*(traits.predictions or ())}
    others = {"mask", "isolated_mask", "next_token_in_slot"}
    return traits.attention == "causal" and "mask_shifted" in predictions and not predictions & others


def _default_d2f(traits: ModelTraits) -> D2F | None:
    """Return the decoder for block-causal models whose prompt is one block."""
    return D2F(block_size=traits.block_size) if traits.prompt_is_block and traits.block_size is not None else None


register_decoder(D2F, _default_d2f)
register_decoder(SetDiffusion, lambda traits: SetDiffusion() if "isolated_mask" in (traits.predictions or ()) else None)
register_decoder(CARD, lambda traits: CARD() if _fits_card(traits) else None)

__all__ = [
    "APD", "CARD", "D2F", "R2FT", "Convolutional", "DiffusionForcing", "GroupPolicy", "SetDiffusion", "SlotSearch",
    "SoftTail", "StaggeredSets",
]  # fmt: skip
