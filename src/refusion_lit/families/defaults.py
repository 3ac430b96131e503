"""Default decoder of a model, chosen from its traits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from refusion_lit.contrib.card import CARD
from refusion_lit.contrib.d2f import D2F
from refusion_lit.contrib.set_diffusion import SetDiffusion
from refusion_lit.engine.decoder import Decoder
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion, TokenEditing
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.families.wedlm import WeDLM
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.types import ModelTraits

NAMEABLE: Mapping[str, type[Decoder]] = {
    cls.__name__: cls
    for cls in (
        Autoregressive, BlockDiffusion, CARD, D2F, FastDLLM, LLaDA, ReFusion, SelfSpeculative, SetDiffusion,
        TokenEditing, WeDLM,
    )
}  # fmt: skip
"""Decoders that a model's config may name; nothing is imported by a name in a file."""


GUESSED = (
    "the model's config does not say what it was trained for; ReFusion is assumed. Name another decoder (--decoder), "
    "attention pattern (--attention, --block_size) or --checkpoint_format."
)


def named_decoder(traits: ModelTraits, entry: Mapping[str, Any], *, has_drafter: bool = False) -> Decoder:
    """Return the default decoder of a model, and warn if nothing says what the model was trained for.

    Args:
        traits: What the model was trained to do.
        entry: The entry ``refusion_lit`` of the model's config, which may name a decoder.
        has_drafter: Whether the model has a drafter.

    Raises:
        ValueError: If the decoder that the entry names is no class with its options.
    """
    decoder = default_decoder(traits, entry.get("decoder"), drafts=has_drafter)
    if traits.predictions is None and isinstance(decoder, ReFusion) and "decoder" not in entry:
        warnings.warn(GUESSED, stacklevel=3)
    return decoder


def default_decoder(traits: ModelTraits, named: Mapping[str, Any] | None = None, *, drafts: bool = False) -> Decoder:
    """Return the default decoder of a model: the one that its authors name, if it fits, or one for its traits.

    It is :class:`SelfSpeculative` for a model with a drafter, else by attention pattern and meaning of the logits:

    - causal: :class:`ReFusion`; :class:`Autoregressive` if tokens predict the next one and masks nothing;
      :class:`CARD` if masks predict the next token too; :class:`WeDLM` if masks predict themselves and clean tokens the
      next one everywhere; :class:`SetDiffusion` if masks predict themselves only where they see no other mask;
    - bidirectional: :class:`LLaDA`;
    - block-causal: :class:`BlockDiffusion`; :class:`D2F` if blocks are counted from the response on;
      :class:`TokenEditing` if visible tokens predict their own place.

    Args:
        traits: What the model was trained to do, including fine-tuning after its publication.
        named: Class and options (``class_path``, ``init_args``) that its format or its config declares.
        drafts: Whether it has a drafter.

    Raises:
        ValueError: If ``named`` is no class with its options.
    """
    if named is not None:
        try:
            cls = NAMEABLE.get(named["class_path"])
            decoder = cls and cls(**named.get("init_args") or {})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "refusion_lit.decoder: expected a decoder with class_path and init_args in the model's config, got "
                f"{named} ({error}); name another --decoder, or correct config.json."
            ) from error
        is_own = isinstance(decoder, SelfSpeculative) or not drafts
        if decoder is not None and is_own and not decoder.requirements().mismatches(traits):
            return decoder
    if drafts:
        return SelfSpeculative()
    shifted = traits.predictions is not None and "mask" not in traits.predictions
    if traits.attention == "bidirectional":
        return LLaDA(shifted=shifted)
    if traits.attention == "block_causal":
        assert traits.block_size is not None
        if traits.prompt_is_block:
            return D2F(block_size=traits.block_size)
        if "visible" in (traits.predictions or ()):
            return TokenEditing(block_size=traits.block_size)
        return BlockDiffusion(block_size=traits.block_size, shifted=shifted)
    if "isolated_mask" in (traits.predictions or ()):
        return SetDiffusion()
    if traits.predictions is None or "next_token_in_slot" in traits.predictions:
        return ReFusion()
    if "mask" in traits.predictions:
        return WeDLM()
    return CARD() if "mask_shifted" in traits.predictions else Autoregressive()
