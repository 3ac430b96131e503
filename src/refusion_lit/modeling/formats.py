"""Formats of published checkpoints: config and weight names, traits, special tokens, default decoder.

A format is declared next to the decoders and objectives of its family (``refusion_lit.families``) and registers itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refusion_lit.types import AttentionKind, ModelTraits, Prediction
from refusion_lit.utils.require import require, require_choice

_NOT_CARRIED = {"architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "_commit_hash"}
"""Options of a published config that describe the authors' classes, not the architecture."""

_NUMBER = "{}"


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """Checkpoint format of one model family, declared as values.

    A family's architecture is one of transformers' own under other names, so its checkpoints load without the Python
    code in their repositories.

    Attributes:
        name: Name in options (``--checkpoint_format``) and messages.
        family: Models of the format, for messages and documentation.
        model_type: ``model_type`` in the family's ``config.json``; ``None`` if it is transformers' own, so that the
            format must be named.
        base: Architecture of transformers that computes the same function.
        config_names: Names of options by transformers' names, where they differ.
        required: Options and the values that transformers' architecture supports; checked if the config has them.
        dropped: Further options of the family's classes that transformers' config must not get.
        weight_names: Pairs of prefixes of weight names, transformers' and the family's; ``{}`` is a layer's number.
            Empty if all names are equal.
        attention: Attention pattern.
        predictions: Meaning of the logits.
        block_size: Tokens per block, for block-causal attention.
        block_size_option: Option of the config that overrides ``block_size``.
        mask_tokens: Texts of the mask token, for families whose config and tokenizer do not name it.
        end_tokens: Texts of further tokens that end a response.
        slow_tokenizer: Transformers class that reads the tokenizer's files, if the published tokenizer is Python code.
        decoder: Class and options of the decoder that the authors publish; a block size is filled in.
    """

    name: str
    family: str
    model_type: str | None
    base: Literal["llama", "qwen2", "qwen3"]
    config_names: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    weight_names: tuple[tuple[str, str], ...] = ()
    attention: AttentionKind
    predictions: tuple[Prediction, ...]
    block_size: int | None = None
    block_size_option: str | None = None
    mask_tokens: tuple[str, ...] = ()
    end_tokens: tuple[str, ...] = ()
    slow_tokenizer: str | None = None
    decoder: str
    decoder_options: Mapping[str, Any] = field(default_factory=dict)

    def traits(self, values: Mapping[str, Any]) -> ModelTraits:
        """Return what a model with this config was trained to do."""
        size = self.block_size
        if self.block_size_option is not None:
            size = values.get(self.block_size_option, size)
        return ModelTraits(attention=self.attention, block_size=size, predictions=self.predictions)

    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of transformers' config for a published one, with traits and default decoder.

        Raises:
            ValueError: If the config needs something that the architecture of transformers lacks.
        """
        for name, allowed in self.required.items():
            holds = name not in values or values[name] in allowed
            expected = f"{' or '.join(map(repr, allowed))} in the config of a {self.name} checkpoint"
            require(holds, f"backbone.source: {name}", expected, values.get(name), "name its own --checkpoint_format")
        ours = {theirs: name for name, theirs in self.config_names.items()}
        dropped = _NOT_CARRIED | self.required.keys() | {*self.dropped}
        options = {ours.get(name, name): value for name, value in values.items() if name not in dropped}
        traits = self.traits(values)
        options["model_type"] = self.base
        options["refusion_lit"] = {**traits.to_dict(), "decoder": self.default_decoder(traits)}
        return options

    def default_decoder(self, traits: ModelTraits) -> dict[str, Any]:
        """Return the published decoder as class and options, for :func:`~refusion_lit.decoding.default_decoder`."""
        options = dict(self.decoder_options)
        if traits.block_size is not None:
            options["block_size"] = traits.block_size
        return {"class_path": self.decoder, "init_args": options}

    @property
    def key_mapping(self) -> dict[str, str]:
        """Transformers' names of weights by patterns of the family's (``key_mapping`` in ``from_pretrained``)."""
        return {f"^{_pattern(theirs)}": ours.replace(_NUMBER, r"\1") for ours, theirs in self.weight_names}

    def published_name(self, name: str) -> str:
        """Return the family's name of a weight for transformers'."""
        for ours, theirs in self.weight_names:
            match = re.match(_pattern(ours), name)
            if match is not None:
                return theirs.format(*match.groups()) + name[match.end() :]
        return name


def _pattern(prefix: str) -> str:
    return re.escape(prefix).replace(re.escape(_NUMBER), r"(\d+)") + r"(?=\.)"


FORMATS: dict[str, CheckpointFormat] = {}
"""Formats of published checkpoints by name. Others load where transformers knows their architecture."""


def register(published: CheckpointFormat) -> None:
    """Make a format known to loading."""
    FORMATS[published.name] = published


def find_format(values: Mapping[str, Any], name: str | None = None) -> CheckpointFormat | None:
    """Return the format of a published config; ``None`` if the config is transformers' own.

    Args:
        values: The options in ``config.json``.
        name: A format's name, which overrides what the config says.

    Raises:
        ValueError: If there is no format of that name, or the config is another family's.
    """
    found = next((each for each in FORMATS.values() if each.model_type == values.get("model_type")), None)
    if name is None:
        return found
    require_choice("checkpoint_format", name, tuple(FORMATS))
    named = FORMATS[name]
    if found is not named and values.get("model_type") != named.base:
        raise ValueError(
            f"checkpoint_format: expected {found.name if found else 'none'} for model_type "
            f"{values.get('model_type')!r}, got {name!r}; leave out --checkpoint_format."
        )
    return named
