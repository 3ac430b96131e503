"""The default decoder that a model's config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refusion_lit.engine.decoder import Decoder
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.d2f import D2F
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion, TokenEditing
from refusion_lit.families.card import CARD
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.set_diffusion import SetDiffusion
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


def named_decoder(published: Mapping[str, Any] | None, traits: ModelTraits) -> Decoder | None:
    """Return the decoder that a model's authors name; ``None`` if it is none of these or no longer fits the model.

    Args:
        published: Class and options (``class_path``, ``init_args``) that its format or its config declares.
        traits: What the model was trained to do, including fine-tuning after its publication.

    Raises:
        ValueError: If ``published`` is no class with its options.
    """
    if published is None:
        return None
    try:
        cls = NAMEABLE.get(published["class_path"])
        decoder = cls and cls(**published.get("init_args") or {})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "refusion_lit.decoder: expected a decoder with class_path and init_args in the model's config, got "
            f"{published} ({error}); name another --decoder, or correct config.json."
        ) from error
    return None if decoder is None or decoder.requirements().mismatches(traits) else decoder
