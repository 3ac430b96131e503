"""A model's default decoder, chosen from its traits."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from refusion_lit.engine.decoder import Decoder
from refusion_lit.families.autoregressive.decoder import Autoregressive
from refusion_lit.families.block_diffusion.decoder import BlockDiffusion
from refusion_lit.families.block_diffusion.token_editing import TokenEditing
from refusion_lit.families.idlm import IntrospectiveStrided
from refusion_lit.families.llada.decoder import LLaDA
from refusion_lit.families.llada.fast_dllm import FastDLLM
from refusion_lit.families.nemotron import CausalBlockDiffusion, LinearSpeculation
from refusion_lit.families.speculative.decoder import SelfSpeculative
from refusion_lit.families.uniform_diffusion import UniformDiffusion
from refusion_lit.families.wedlm import WeDLM
from refusion_lit.plugins import load_plugins
from refusion_lit.refusion.decoder import ReFusion
from refusion_lit.types import ModelTraits
from refusion_lit.utils.require import require

NAMEABLE: dict[str, type[Decoder]] = {
    cls.__name__: cls
    for cls in (
        Autoregressive,
        BlockDiffusion,
        CausalBlockDiffusion,
        FastDLLM,
        IntrospectiveStrided,
        LLaDA,
        LinearSpeculation,
        ReFusion,
        SelfSpeculative,
        TokenEditing,
        UniformDiffusion,
        WeDLM,
    )
}
"""Decoders that a model's config may name. Only these: a name in a config never causes an import."""

GUESSED = (
    "the model's config does not say what it was trained for; ReFusion is assumed. Name another decoder (--decoder), "
    "attention pattern (--attention, --block_size) or --checkpoint_format."
)


def named_decoder(traits: ModelTraits, entry: Mapping[str, Any], *, has_drafter: bool = False) -> Decoder:
    """Return a model's default decoder. Warn if the model's training is unknown or the named decoder does not fit.

    Args:
        traits: What the model was trained to do.
        entry: The entry ``refusion_lit`` in the model's config, which may name a decoder.
        has_drafter: Whether the model has a drafter.

    Raises:
        ValueError: If the entry names an unknown decoder or wrong options.

    >>> named_decoder(ModelTraits(predictions=("next_token",)), {})
    Autoregressive()
    """
    named = entry.get("decoder")
    decoder = default_decoder(traits, named, drafts=has_drafter)
    if traits.predictions is None and isinstance(decoder, ReFusion) and "decoder" not in entry:
        warnings.warn(GUESSED, stacklevel=3)
    # The config's decoder may be out of date: a training or an option may have changed the traits.
    is_unchanged = ModelTraits.from_dict(entry) == traits and not has_drafter
    if named is not None and _OBJECTIVE not in named and is_unchanged:
        name = named["class_path"].rpartition(".")[2]
        if name != type(decoder).__name__:
            fix = "Name another --decoder, or correct config.json."
            message = f"the model's config names the decoder {name}, which does not fit the model"
            warnings.warn(f"{message}; {type(decoder).__name__} is used. {fix}", stacklevel=3)
    return decoder


_REGISTERED: list[Callable[[ModelTraits], Decoder | None]] = []


def register_decoder(cls: type[Decoder], make_default: Callable[[ModelTraits], Decoder | None]) -> None:
    """Register a plugin's decoder: models' configs may name it, and it may be the default for some models.

    Args:
        cls: The decoder class.
        make_default: Takes a model's traits. Returns a decoder if the class is the default for these traits, else
            ``None``.

    >>> from refusion_lit.contrib import CARD  # registers CARD, for models in which masks predict the next token
    >>> default_decoder(ModelTraits(predictions=("mask_shifted", "next_token"))) == CARD()
    True
    """
    NAMEABLE[cls.__name__] = cls
    _REGISTERED.append(make_default)


def default_decoder(traits: ModelTraits, named: Mapping[str, Any] | None = None, *, drafts: bool = False) -> Decoder:
    """Return a model's default decoder: the named decoder if it fits, otherwise a decoder chosen by traits.

    A model with a drafter gets :class:`SelfSpeculative`. Otherwise the attention pattern and the meaning of the logits
    decide:

    - causal: :class:`ReFusion`; :class:`Autoregressive` if masks predict nothing; :class:`WeDLM` if masks predict
      themselves and clean tokens the next token everywhere; :class:`UniformDiffusion` if canvas tokens predict
      themselves; :class:`CausalBlockDiffusion` if masks predict themselves in a block that sees all of itself;
    - bidirectional: :class:`LLaDA`;
    - block-causal: :class:`BlockDiffusion`; :class:`TokenEditing` if visible tokens predict themselves.

    Plugins' rules (:func:`register_decoder`) come first.

    Args:
        traits: What the model was trained to do, fine-tuning included.
        named: ``class_path`` and ``init_args`` from the model's checkpoint format or config.
        drafts: Whether the model has a drafter.

    Raises:
        ValueError: If ``named`` has an unknown class or wrong options.

    >>> default_decoder(ModelTraits(attention="bidirectional", predictions=("mask",)))
    LLaDA(...)
    """
    load_plugins()
    decoder = None if named is None else _build(named)
    if decoder is not None:
        uses_drafter = isinstance(decoder, SelfSpeculative) or not drafts
        if uses_drafter and not decoder.requirements().mismatches(traits):
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
    if traits.predictions is None:
        return ReFusion()
    return next((cls() for name, cls in _CAUSAL.items() if name in traits.predictions), Autoregressive())


_CAUSAL: dict[str, type[Decoder]] = {
    "next_token_in_slot": ReFusion,
    "block_mask": CausalBlockDiffusion,
    "mask": WeDLM,
    "visible": UniformDiffusion,
}
"""Default decoders of causal models by what they predict; the first that fits."""


def entry_with_decoder(
    entry: Mapping[str, Any], traits: ModelTraits, decoders: Iterable[Decoder], objective: type
) -> dict[str, Any]:
    """Return a model's entry ``refusion_lit`` with the decoder for an objective from another package.

    Traits do not identify the decoder for an objective from another package, so the entry names the first decoder that
    fits. A decoder that an earlier training wrote for such an objective is removed.

    Args:
        entry: The entry so far.
        traits: What the objective trains.
        decoders: Candidates, such as the decoders in the training's config.
        objective: Class of the objective.

    >>> entry_with_decoder({}, ModelTraits(predictions=("mask",)), [ReFusion(), WeDLM()], ModelTraits)
    {}
    """
    kept = dict(entry)
    if isinstance(kept.get("decoder"), Mapping) and _OBJECTIVE in kept["decoder"]:
        del kept["decoder"]
    if objective.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return kept
    for decoder in decoders:
        needs = decoder.requirements()
        if needs.drafter or needs.mismatches(traits):
            continue
        cls = type(decoder)
        name = cls.__name__ if NAMEABLE.get(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"
        values = {"class_path": name, "init_args": changed_options(decoder), _OBJECTIVE: objective.__qualname__}
        return {**kept, "decoder": json.loads(json.dumps(values, default=repr))}
    return kept


_OBJECTIVE = "objective"
"""Key of the objective's class in a decoder's entry, for objectives from other packages."""


def changed_options(decoder: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    """Return a decoder's options that differ from the defaults."""
    values = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    try:
        default = type(decoder)()
    except TypeError:  # another package's decoder may require options
        return values
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _build(named: Mapping[str, Any]) -> Decoder | None:
    """Build the decoder named in a model's config; the class path may omit the package.

    A training may have stored a decoder from another package. It is used only if the program has imported its module,
    because a name in a config never causes an import. Otherwise warn and return ``None``.
    """
    try:
        if _OBJECTIVE in named and named["class_path"] not in NAMEABLE:
            module, _, name = named["class_path"].rpartition(".")
            cls = getattr(sys.modules.get(module), name, None)
            if not isinstance(cls, type) or not issubclass(cls, Decoder):
                warnings.warn(
                    f"the model was trained by {named[_OBJECTIVE]} for the decoder {named['class_path']}, whose module "
                    "is not imported, so the decoder is chosen by what the model predicts. Name a decoder (--decoder).",
                    stacklevel=5,
                )
                return None
        else:
            package, _, name = named["class_path"].rpartition(".")
            root = package.partition(".")[0]
            is_nameable = name in NAMEABLE and root in ("", "refusion_lit", NAMEABLE[name].__module__.partition(".")[0])
            require(is_nameable, "class_path", f"one of {', '.join(NAMEABLE)}", named["class_path"], "name one of them")
            cls = NAMEABLE[name]
        unknown = sorted(named.keys() - {"class_path", "init_args", _OBJECTIVE})
        require(not unknown, "decoder", "the keys class_path and init_args", unknown, "move options to init_args")
        return cls(**named.get("init_args") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "refusion_lit.decoder: expected a decoder with class_path and init_args in the model's config, got "
            f"{named} ({error}); name another --decoder, or correct config.json."
        ) from error
