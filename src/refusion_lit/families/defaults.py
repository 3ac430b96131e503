"""Default decoder of a model, chosen from its traits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from refusion_lit.engine.decoder import Decoder
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion
from refusion_lit.families.block_diffusion.token_editing import TokenEditing
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.families.wedlm import WeDLM
from refusion_lit.plugins import load_plugins
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.types import ModelTraits
from refusion_lit.utils.require import require

NAMEABLE: dict[str, type[Decoder]] = {
    cls.__name__: cls
    for cls in (Autoregressive, BlockDiffusion, FastDLLM, LLaDA, ReFusion, SelfSpeculative, TokenEditing, WeDLM)
}
"""Decoders that a model's config may name; a name in a file never makes the program import anything."""

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


_REGISTERED: list[Callable[[ModelTraits], Decoder | None]] = []


def register_decoder(cls: type[Decoder], make_default: Callable[[ModelTraits], Decoder | None]) -> None:
    """Make a plugin's decoder the default of some models, and a decoder that a model's config may name.

    Args:
        cls: The decoder.
        make_default: Returns the decoder if it is the default for a model with these traits, else ``None``.
    """
    NAMEABLE[cls.__name__] = cls
    _REGISTERED.append(make_default)


def default_decoder(traits: ModelTraits, named: Mapping[str, Any] | None = None, *, drafts: bool = False) -> Decoder:
    """Return the default decoder of a model: the decoder that its authors name, if it fits, else by its traits.

    A model with a drafter gets :class:`SelfSpeculative`. Otherwise attention pattern and meaning of the logits decide:

    - causal: :class:`ReFusion`; :class:`Autoregressive` if masks predict nothing; :class:`WeDLM` if masks predict
      themselves and clean tokens predict the next token everywhere;
    - bidirectional: :class:`LLaDA`;
    - block-causal: :class:`BlockDiffusion`; :class:`TokenEditing` if visible tokens predict their own place.

    Plugins may register decoders for further traits (:func:`register_decoder`); they are asked first.

    Args:
        traits: What the model was trained to do, including fine-tuning after its publication.
        named: Class and options (``class_path``, ``init_args``) that the model's format or config declares.
        drafts: Whether the model has a drafter.

    Raises:
        ValueError: If ``named`` is no nameable decoder with its options.
    """
    load_plugins()
    if named is not None:
        decoder = _build(named)
        is_own = isinstance(decoder, SelfSpeculative) or not drafts
        if is_own and not decoder.requirements().mismatches(traits):
            return decoder
    if drafts:
        return SelfSpeculative()
    for make_default in _REGISTERED:
        if (decoder := make_default(traits)) is not None:
            return decoder
    shifted = traits.predictions is not None and "mask" not in traits.predictions
    if traits.attention == "bidirectional":
        return LLaDA(shifted=shifted)
    if traits.attention == "block_causal":
        assert traits.block_size is not None
        if "visible" in (traits.predictions or ()):
            return TokenEditing(block_size=traits.block_size)
        return BlockDiffusion(block_size=traits.block_size, shifted=shifted)
    if traits.predictions is None or "next_token_in_slot" in traits.predictions:
        return ReFusion()
    if "mask" in traits.predictions:
        return WeDLM()
    return Autoregressive()


def _build(named: Mapping[str, Any]) -> Decoder:
    """Build the decoder that a model's config names, with its package or without."""
    try:
        package, _, name = named["class_path"].rpartition(".")
        is_nameable = name in NAMEABLE and package.partition(".")[0] in ("", "refusion_lit")
        require(is_nameable, "class_path", f"one of {', '.join(NAMEABLE)}", named["class_path"], "name one of them")
        return NAMEABLE[name](**named.get("init_args") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "refusion_lit.decoder: expected a decoder with class_path and init_args in the model's config, got "
            f"{named} ({error}); name another --decoder, or correct config.json."
        ) from error
