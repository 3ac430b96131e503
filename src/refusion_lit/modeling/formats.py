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
"""Options in published configs that describe the authors' classes, not the architecture."""

_NUMBER = "{}"


CARRIED = ("decoder", "prompt_template")
"""Keys that an exported config in a published format may have in its entry ``refusion_lit``."""


@dataclass(frozen=True, kw_only=True)
class ServingProgram:
    """A program that serves models in a published format, such as SGLang.

    Attributes:
        name: The program's name.
        command: Command line, with ``{model}`` for the directory and ``{block_size}``.
        block_size: The only block size that the program decodes with; ``None``: any.
        mask_token_id: The mask token that the program always uses; ``None``: the model's mask token.
        values: Config options with the only values that the program supports.
    """

    name: str
    command: str
    block_size: int | None = None
    mask_token_id: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExportLayout:
    """Contents of a format's exported config, in addition to the architecture's options.

    Attributes:
        repository: Hub repository with the authors' classes, for ``auto_map``; ``None``: no repository has them.
        classes: The authors' classes, keyed by transformers' automatic class: ``auto_map`` without the repository.
        architecture: Name in ``architectures``; ``None`` if it is not known.
        options: Options to write in addition to ``COMMON_OPTIONS``, by transformers' names.
        omitted: Options in ``COMMON_OPTIONS`` that the family's config lacks.
        constants: Options with constant values, in addition to the format's ``required`` options.
        supported: Transformers' options with the values that the family's classes compute.
        absent_weights: Endings of weight names in transformers that the family's classes lack.
        bases: The family's architectures in transformers, if there are others than ``base``.
        decoder_names: The authors' names of the decoder's options, for the generation config.
        decoder_values: The authors' option values, keyed by ours, where they differ or the authors do not know all of
            ours.
        generation: Further entries in the generation config, for the format's decoder. The decoder's set options
            replace them.
        has_index: Whether programs need ``model.safetensors.index.json`` even for a single file.
        engines: Programs that serve models in the format.
    """

    repository: str | None
    classes: Mapping[str, str]
    architecture: str | None
    options: tuple[str, ...]
    omitted: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    absent_weights: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    decoder_names: Mapping[str, str] = field(default_factory=dict)
    decoder_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    has_index: bool = False
    engines: tuple[ServingProgram, ...] = ()


COMMON_OPTIONS = (
    "attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range",
    "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""Options in most families' configs."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """A model family's checkpoint format, declared as values.

    The family's architecture exists in transformers under other names. Checkpoints therefore load without the Python
    code in their repositories.

    Attributes:
        name: Name in options (``--checkpoint_format``) and messages.
        family: The format's models, for messages and documentation.
        model_type: ``model_type`` in the family's ``config.json``; ``None`` if transformers uses the same name. Users
            must then name the format.
        source_pattern: Pattern for hub ids and directory names, in lower case, if families share a ``model_type``.
        base: The architecture in transformers that computes the same function.
        config_names: The family's names of options, keyed by transformers' names, where they differ.
        required: Options with the values that transformers' architecture supports; checked if the config has them.
            Exports write the first value, unless it is ``None``.
        dropped: Further options that transformers' config must not get.
        weight_names: Pairs of weight name prefixes, transformers' and the family's; ``{}`` is a layer's number. Empty
            if all names are equal. If several transformers weights have the same published name, they are rows of that
            tensor, in this order. Experts need no entry: transformers stacks and splits them.
        attention: Attention pattern.
        predictions: Meaning of the logits.
        block_size: Tokens per block, for block-causal attention.
        block_size_option: Config option that overrides ``block_size``.
        mask_tokens: Possible texts of the mask token, if neither config nor tokenizer names it.
        has_mask: Whether the family has a mask token. If not, the tokenizer gets none.
        draws_padding: Whether padding is a token that the model predicts.
        end_tokens: Further tokens that end a response, as texts.
        slow_tokenizer: Transformers class that reads the tokenizer's files, if the published tokenizer is Python code.
        decoder: Name of the decoder class that the authors publish.
        decoder_options: Options of the decoder; loading adds the block size.
        reads_generation_config: Whether :meth:`library_options` gets the contents of ``generation_config.json``, too,
            under ``generation_config``.
        layout: How ``export --format`` writes a config of the format; ``None`` if it cannot.

    >>> import refusion_lit.decoding  # registers the formats
    >>> llada = FORMATS["llada"]
    >>> llada.published_name("model.layers.3.self_attn.q_proj.weight")
    'model.transformer.blocks.3.q_proj.weight'
    """

    name: str
    family: str
    model_type: str | None
    source_pattern: str | None = None
    base: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "ministral3", "diffusion_gemma"]
    config_names: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    weight_names: tuple[tuple[str, str], ...] = ()
    attention: AttentionKind
    predictions: tuple[Prediction, ...]
    block_size: int | None = None
    block_size_option: str | None = None
    mask_tokens: tuple[str, ...] = ()
    has_mask: bool = True
    draws_padding: bool = False
    end_tokens: tuple[str, ...] = ()
    slow_tokenizer: str | None = None
    decoder: str
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    reads_generation_config: bool = False
    layout: ExportLayout | None = None

    def traits(self, values: Mapping[str, Any]) -> ModelTraits:
        """Return what a model with this config was trained to do."""
        size = self.block_size
        if self.block_size_option is not None:
            size = values.get(self.block_size_option, size)
        return ModelTraits(attention=self.attention, block_size=size, predictions=self.predictions)

    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a published config to transformers' options, with traits and default decoder.

        Raises:
            ValueError: If the config needs something that the architecture of transformers lacks.
        """
        for name, allowed in self.required.items():
            is_supported = name not in values or values[name] in allowed
            expected = f"{' or '.join(map(repr, allowed))} in the config of a {self.name} checkpoint"
            fix = "name its own --checkpoint_format"
            require(is_supported, f"backbone.source: {name}", expected, values.get(name), fix)
        library_names = {name: library_name for library_name, name in self.config_names.items()}
        dropped = _NOT_CARRIED | self.required.keys() | {*self.dropped, "refusion_lit"}
        options = {library_names.get(name, name): value for name, value in values.items() if name not in dropped}
        traits = self.traits(values)
        options["model_type"] = self.base
        entry = values.get("refusion_lit") or {}
        require(isinstance(entry, Mapping), "refusion_lit in the config", "a mapping", entry, "correct it")
        exported = {name: entry[name] for name in CARRIED if name in entry}
        options["refusion_lit"] = {**traits.to_dict(), "decoder": self.default_decoder(traits), **exported}
        return options

    def default_decoder(self, traits: ModelTraits) -> dict[str, Any]:
        """Return the published decoder as class and options, for :func:`~refusion_lit.decoding.default_decoder`."""
        options = dict(self.decoder_options)
        if traits.block_size is not None:
            options["block_size"] = traits.block_size
        return {"class_path": self.decoder, "init_args": options}

    @property
    def key_mapping(self) -> dict[str, str]:
        """Transformers' weight names by patterns of the family's names (``key_mapping`` in ``from_pretrained``)."""
        fused = self.fused_weights
        renamed = [(ours, theirs) for ours, theirs in self.weight_names if theirs not in fused]
        return {f"^{_pattern(theirs)}": ours.replace(_NUMBER, r"\1") for ours, theirs in renamed}

    @property
    def fused_weights(self) -> dict[str, list[str]]:
        """For every tensor that joins several weights' rows: transformers' names of the weights, in order."""
        parts: dict[str, list[str]] = {}
        for ours, theirs in self.weight_names:
            parts.setdefault(theirs, []).append(ours)
        return {theirs: ours for theirs, ours in parts.items() if len(ours) > 1}

    def published_name(self, name: str) -> str:
        """Return the family's name of a weight for transformers'."""
        return self.locate(name)[0]

    def locate(self, name: str) -> tuple[str, int]:
        """Translate a weight's transformers name to the family's; also return its rank among fused weights."""
        for rank, (ours, theirs) in enumerate(self.weight_names):
            match = re.match(_pattern(ours), name)
            if match is not None:
                return theirs.format(*match.groups()) + name[match.end() :], rank
        return name, 0


def _pattern(prefix: str) -> str:
    return re.escape(prefix).replace(re.escape(_NUMBER), r"(\d+)") + r"(?=\.|$)"


FORMATS: dict[str, CheckpointFormat] = {}
"""Formats of published checkpoints by name. Other checkpoints load if transformers knows the architecture."""


def register(published: CheckpointFormat) -> None:
    """Make a format known to loading."""
    FORMATS[published.name] = published


def find_format(values: Mapping[str, Any], name: str | None = None, source: str = "") -> CheckpointFormat | None:
    """Return the format of a published config; ``None`` for a config in transformers' format.

    Args:
        values: The options in ``config.json``.
        name: A format's name, which overrides what the config says.
        source: Directory or hub id, whose last part decides between formats with one ``model_type``.

    Raises:
        ValueError: If no format has this name, or the config belongs to another family.
    """
    model_type = values.get("model_type")
    # Users must name a format whose model type is transformers', too.
    declared = [entry for entry in FORMATS.values() if model_type and entry.model_type == model_type]
    if name is None:
        stem = source.rstrip("/").rpartition("/")[2].lower()
        named = [entry for entry in declared if entry.source_pattern and re.search(entry.source_pattern, stem)]
        return next(iter(named + [entry for entry in declared if entry.source_pattern is None]), None)
    require_choice("checkpoint_format", name, tuple(FORMATS))
    named_format = FORMATS[name]
    if named_format not in declared and model_type != named_format.base:
        expected = " or ".join(entry.name for entry in declared) or "none"
        raise ValueError(
            f"checkpoint_format: expected {expected} for model_type {model_type!r}, got {name!r}; leave out "
            "--checkpoint_format."
        )
    return named_format
