"""Models for inference from checkpoints, Hugging Face directories and hub ids, and the metadata of checkpoints."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from refusion_lit.checkpoints.files import (
    check_weights,
    is_checkpoint_file,
    is_sharded_checkpoint,
    model_source,
    read_checkpoint,
)
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.decoding import Decoder, ReFusion, SelfSpeculative, default_decoder
from refusion_lit.modeling.architecture import check_source, config_of_source, stored_config
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import OPTIONS_FILE, WEIGHTS_FILE, DrafterOrigin, load_drafter
from refusion_lit.modeling.formats import format_of
from refusion_lit.modeling.fsdp import load_sharded
from refusion_lit.modeling.loading import BackboneConfig, DType, attach, decoding_dtype, default_device
from refusion_lit.modeling.lora import Adapters, merged
from refusion_lit.modeling.saving import HAS_DRAFTER, PROMPT_TEMPLATE
from refusion_lit.text_model import GUESSED, TextModel
from refusion_lit.types import ModelTraits, SamplingParams
from refusion_lit.utils.errors import reason_of
from refusion_lit.utils.require import require, require_choice
from refusion_lit.version import __version__

METADATA_KEY = "refusion_lit"
_FORMAT = 1
"""Raised when an older version could not read what this one writes."""

_WEIGHTS_PREFIX = "backbone."


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Description of a checkpoint's model in plain values, which load with ``weights_only``.

    Attributes:
        architecture: The transformers config as JSON values, with the vocabulary size of the stored weights.
        traits: What the model was trained to do.
        tokenizer_files: The tokenizer's files by name.
        prompt_template: Turns a query into a prompt where the tokenizer has no chat template.
        adapters: The low-rank adapters among the weights, ``None`` if there are none.
        drafter: The drafter among the weights, ``None`` if there is none.
    """

    architecture: dict[str, Any]
    traits: ModelTraits
    tokenizer_files: dict[str, str]
    prompt_template: str = "{query}"
    adapters: Adapters | None = None
    drafter: DrafterOrigin | None = None

    @classmethod
    def of(cls, model: TextModel) -> CheckpointMetadata:
        """Return the description of a model."""
        backbone = model.backbone
        return cls(
            architecture=backbone.config.to_dict(),
            traits=backbone.traits,
            tokenizer_files=tokenizer_files(model.tokenizer),
            prompt_template=model.prompt_template,
            adapters=backbone.adapters,
            drafter=None if backbone.drafter is None else backbone.drafter.origin,
        )

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the value to store under ``METADATA_KEY``."""
        return {
            "version": __version__,
            "format": _FORMAT,
            "architecture": json.dumps(self.architecture, default=str),
            "traits": json.dumps(self.traits.to_dict()),
            "tokenizer_files": dict(self.tokenizer_files),
            "prompt_template": self.prompt_template,
            "adapters": None if self.adapters is None else json.dumps(asdict(self.adapters)),
            "drafter": None if self.drafter is None else json.dumps(asdict(self.drafter)),
        }

    @classmethod
    def from_checkpoint(cls, checkpoint: Mapping[str, Any], path: str | Path) -> CheckpointMetadata:
        """Read a checkpoint's metadata.

        Args:
            checkpoint: The checkpoint's values.
            path: Its file, for messages.

        Raises:
            ValueError: If the checkpoint was not written by this package, or by a newer version.
        """
        stored = checkpoint.get(METADATA_KEY)
        if not isinstance(stored, dict) or "architecture" not in stored:
            raise ValueError(
                f"ckpt_path: expected a checkpoint written by refusion-lit, got {path}, which says nothing of its "
                "architecture and tokenizer. Train one with `refusion-lit fit`, or give a Hugging Face directory."
            )
        if stored.get("format", 1) > _FORMAT:
            raise ValueError(
                f"ckpt_path: expected a checkpoint that refusion-lit {__version__} can read, got {path}, which "
                f"refusion-lit {stored.get('version')} wrote; install that version or a newer one."
            )
        try:
            adapters = stored.get("adapters")
            drafter = stored.get("drafter")
            return cls(
                architecture=json.loads(stored["architecture"]),
                traits=ModelTraits.from_dict(json.loads(stored["traits"])),
                tokenizer_files=stored["tokenizer_files"],
                prompt_template=stored.get("prompt_template", "{query}"),
                adapters=None if adapters is None else Adapters.from_dict(json.loads(adapters)),
                drafter=None if drafter is None else DrafterOrigin.from_dict(json.loads(drafter)),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"ckpt_path: the metadata in {path}, which refusion-lit {stored.get('version')} wrote, cannot be read "
                f"({reason_of(error)}). Export it with that version."
            ) from error

    def backbone_config(self) -> BackboneConfig:
        """Return options that rebuild the model with random weights, adapters and drafter included."""
        architecture = {k: v for k, v in self.architecture.items() if k not in {"dtype", "torch_dtype"}}
        return BackboneConfig(
            config=architecture,
            lora=None if self.adapters is None else self.adapters.options,
            drafter=None if self.drafter is None else self.drafter.options,
        )


def load(
    source: str | Path,
    *,
    dtype: DType | torch.dtype | Literal["auto"] = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    overrides: BackboneConfig | None = None,
    draft: str | Path | None = None,
    verifier: str | Path | None = None,
) -> TextModel:
    """Load a model for inference; a checkpoint's adapters are merged into its weights.

    Args:
        source: Path of a checkpoint or a Hugging Face directory, or a hub id.
        dtype: Type of the weights. ``auto``: that of the checkpoint, but float32 on a CPU that has no instructions for
            a 16-bit type.
        device: Device of the weights. ``auto``: a GPU that CUDA finds, else the CPU.
        revision: Pinned revision of a hub id.
        trust_remote_code: Let the source run Python code of its own on this machine.
        overrides: Attention pattern and implementation, for directories that do not state theirs, ``fused_body`` and
            ``batch_invariant``.
        draft: Directory of a drafter for the model, for :class:`~refusion_lit.decoding.SelfSpeculative`; ``None``: the
            source's own, if it has one.
        verifier: Path or hub id of an autoregressive model with the same tokenizer, for
            :class:`~refusion_lit.decoding.APD`.

    Raises:
        ValueError: If it cannot be loaded.
    """
    fix = "give a path or a hub id"
    require(isinstance(source, str | Path), "source", "a checkpoint, a directory or a hub id", source, fix)
    dtype = cast("DType", str(dtype).removeprefix("torch."))
    require_choice("dtype", dtype, ("auto", *get_args(DType)))
    device = _device(device)
    source = model_source(source)
    require(isinstance(overrides, BackboneConfig | None), "overrides", "a BackboneConfig", overrides, "create one")
    code: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    options = replace(overrides or BackboneConfig(source=source), source=source, dtype=dtype, **code)
    if is_checkpoint_file(source):
        model = _from_checkpoint(source, options, device)
    else:
        model = _from_directory(source, options, device)
        stored = getattr(model.backbone.config, "refusion_lit", None) or {}
        if draft is None and stored.get(HAS_DRAFTER):
            draft = own_draft(source, revision)
    if draft is not None:
        attach(model.backbone, load_drafter(model.backbone.body, draft))
    model.backbone.to(device).eval()
    if verifier is not None:
        try:
            other = load(verifier, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"verifier: {str(error).removeprefix('ckpt_path: ')}") from error
        pair(model, other)
    return model


def pair(model: TextModel, other: TextModel) -> None:
    """Make an autoregressive model the verifier of another model's :class:`~refusion_lit.decoding.APD`.

    Raises:
        ValueError: If it has another tokenizer.
    """
    own = model.tokenizer.get_vocab()
    given = other.tokenizer.get_vocab()
    differing = next((token for token, number in given.items() if own.get(token, number) != number), None)
    got = f"one with another id for {differing!r}"
    require(differing is None, "verifier", "a model with the same tokenizer", got, "load another one")
    model.verifier = other.backbone


def own_draft(source: str, revision: str | None) -> str:
    """Return the directory of the drafter that a directory or a revision of a hub id holds beside its model."""
    files = [cached_file(source, name, revision=revision) for name in (OPTIONS_FILE, WEIGHTS_FILE)]
    return str(Path(str(files[0])).parent)


def own_decoder(options: Mapping[str, Any]) -> Decoder:
    """Return a model's default decoder by its config alone; ReFusion where that cannot be read, which loading tells.

    Args:
        options: Options of a command: ``ckpt_path``, and of the others those that change which decoder it is.
    """
    last = Path(str(options["ckpt_path"])) / "checkpoints" / "last.ckpt"
    source = str(last if last.exists() else options["ckpt_path"])
    stored: dict[str, Any] = {}
    decoder: Decoder = SelfSpeculative() if options.get("draft") else ReFusion()
    with suppress(ValueError):
        if is_checkpoint_file(source):
            metadata = CheckpointMetadata.from_checkpoint(read_checkpoint(source, mmap=True), source)
            stored = {**(metadata.architecture.get("refusion_lit") or {}), **metadata.traits.to_dict()}
            stored[HAS_DRAFTER] = metadata.drafter is not None
        else:
            check_source(source, "ckpt_path")
            values = stored_config(source, options.get("revision"))
            published = format_of(values, options.get("checkpoint_format"))
            stored = (published.library_options(values) if published else values).get("refusion_lit") or {}
        given = {name: options[name] for name in ("attention", "block_size") if options.get(name)}
        traits = ModelTraits.from_dict(stored if "attention" in stored else stored | given)
        has_drafter = bool(options.get("draft") or stored.get(HAS_DRAFTER))
        decoder = default_decoder(traits, stored.get("decoder"), drafts=has_drafter)
        if traits.predictions is None and isinstance(decoder, ReFusion) and "decoder" not in stored:
            warnings.warn(GUESSED, stacklevel=2)
        if "max_new_tokens" in options:
            decoder = decoder.fitted(SamplingParams(max_new_tokens=options["max_new_tokens"]))
    return decoder


def load_model_of(options: Mapping[str, Any]) -> TextModel:
    """Load the model that a command's options name, and print its size.

    Raises:
        ValueError: If it cannot be loaded.
    """
    path, decoder = options["ckpt_path"], options["decoder"]
    is_used = decoder is not None and "verifier" in decoder.requirements().predictions
    got = "the model's own" if decoder is None else type(decoder).__name__
    holds = is_used or options["verifier"] is None
    require(holds, "verifier", "a decoder that uses it, as APD does", got, "add --decoder APD, or leave it out")
    own = {name: options[name] for name in ("checkpoint_format", "attention", "block_size", "batch_invariant")}
    others = {name: options[name] for name in ("dtype", "device", "revision", "trust_remote_code", "draft", "verifier")}
    model = load(path, overrides=BackboneConfig(source=path, **own), **others)
    size = sum(weights.numel() for weights in model.backbone.parameters())
    number = f"{size / 1e6:.1f} million" if size >= 1e5 else f"{size / 1e3:.1f} thousand"
    kind = str(model.backbone.head.weight.dtype).removeprefix("torch.")
    sys.stderr.write(f"{path}: {number} parameters, {kind} on {model.backbone.device}\n")
    return model


def _device(name: str | torch.device) -> torch.device:
    """Return the device of a name, having made sure that this machine has it."""
    require(str(name).partition(":")[0] != "meta", "device", "one that computes", str(name), "use cpu or cuda")
    try:
        device = torch.device(default_device() if name == "auto" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is missing
        got = f"{str(name)!r} ({reason_of(error)})"
        raise ValueError(f"device: expected one that this machine has, got {got}; use cpu, or auto.") from error
    return device


def _from_checkpoint(source: str, options: BackboneConfig, device: torch.device) -> TextModel:
    """Return the model of a checkpoint, with merged adapters."""
    model = load_checkpoint(source, options, device)
    adapted = model.backbone
    model.backbone = Backbone(
        merged(adapted.model),
        adapted.traits,
        adapted.special_tokens,
        fused_body=options.fused_body,
        batch_invariant=options.batch_invariant,
    )
    if adapted.drafter is not None:
        attach(model.backbone, adapted.drafter)
    return model


def _from_directory(source: str, options: BackboneConfig, device: torch.device) -> TextModel:
    """Return the model of a Hugging Face directory or a hub id, without a drafter."""
    check_source(source, "ckpt_path")
    code: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    if not options.trust_remote_code or options.dtype == "auto":  # refuse an unknown architecture before its tokenizer
        config, _ = config_of_source(source, options.config, name=options.checkpoint_format, **code)
        if options.dtype == "auto":
            options = replace(options, dtype=decoding_dtype(config, device))
    tokenizer = PretrainedTokenizer(source=source, checkpoint_format=options.checkpoint_format, **code).build(None)
    backbone = options.build(tokenizer)
    stored = getattr(backbone.config, "refusion_lit", None) or {}
    stated = stored.get("attention")
    is_kept = None in (stated, options.attention) or stated == options.attention
    require(is_kept, "attention", f"{stated}, which the model was trained with", options.attention, "leave it out")
    return TextModel(backbone, tokenizer, stored.get(PROMPT_TEMPLATE, "{query}"))


def load_checkpoint(
    path: str | Path, options: BackboneConfig | None = None, device: str | torch.device = "cpu"
) -> TextModel:
    """Rebuild the model of a checkpoint as it was trained, with its adapters unmerged.

    Args:
        path: The checkpoint, sharded or not.
        options: Gives ``dtype`` and ``attn_implementation``; its ``attention`` and ``block_size`` are ``None`` or those
            that are stored.
        device: Where the model will be, for a ``dtype`` of ``auto``.

    Raises:
        ValueError: If it cannot be read, its weights do not fit its metadata, or it was trained with another attention.
    """
    checkpoint = read_checkpoint(path)
    metadata = CheckpointMetadata.from_checkpoint(checkpoint, path)
    for name in ("attention", "block_size"):
        stored = getattr(metadata.traits, name)
        got = getattr(options, name, None)
        require(got in (None, stored), name, f"{stored}, which the checkpoint was trained with", got, "leave it out")
    tokenizer = tokenizer_from_files(metadata.tokenizer_files, path)
    if options is not None and options.dtype == "auto":
        options = replace(options, dtype=decoding_dtype(metadata.architecture, device))
    backbone = _rebuilt(metadata, tokenizer, options)
    if is_sharded_checkpoint(path):
        load_sharded(path, {_WEIGHTS_PREFIX + name: tensor for name, tensor in backbone.state_dict().items()})
    else:
        _load_weights(backbone, checkpoint["state_dict"])
    return TextModel(backbone, tokenizer, metadata.prompt_template)


def restore_metadata(
    checkpoint: dict[str, Any], backbone: Backbone, tokenizer: PreTrainedTokenizerBase | None, *, resumes: bool
) -> None:
    """Tell a training module's backbone what the weights of a checkpoint were trained for, before it loads them.

    Args:
        checkpoint: The checkpoint. Its weights get their adapters merged if the backbone has none.
        backbone: The backbone; its traits are set.
        tokenizer: Its tokenizer.
        resumes: Whether a training resumes from the checkpoint; adapters then stay as they are.

    Raises:
        ValueError: If the weights were trained with other tokens, or do not fit the metadata.
    """
    metadata = CheckpointMetadata.from_checkpoint(checkpoint, "the checkpoint")
    stored = tokenizer_from_files(metadata.tokenizer_files)
    if tokenizer is not None and stored.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"data.tokenizer: expected the {len(stored)} tokens that the checkpoint was trained with, got "
            f"{len(tokenizer)} others. Take the config and the data that the checkpoint was trained with."
        )
    backbone.traits = metadata.traits
    if metadata.adapters is not None and backbone.adapters is None and not resumes:
        adapted = _rebuilt(metadata, stored, None)
        _load_weights(adapted, checkpoint["state_dict"])
        adapted.model = merged(adapted.model)
        checkpoint["state_dict"] = {_WEIGHTS_PREFIX + name: value for name, value in adapted.state_dict().items()}


def _rebuilt(
    metadata: CheckpointMetadata, tokenizer: PreTrainedTokenizerBase, options: BackboneConfig | None
) -> Backbone:
    """Return the metadata's model with random weights."""
    config = metadata.backbone_config()
    if options is not None:
        config = replace(config, dtype=options.dtype, attn_implementation=options.attn_implementation)
    backbone = config.build(tokenizer, seed=0)  # leaves the global generator as it is
    backbone.traits = metadata.traits
    backbone.adapters = metadata.adapters
    if backbone.drafter is not None and metadata.drafter is not None:
        backbone.drafter.origin = metadata.drafter
    return backbone


def _load_weights(backbone: Backbone, weights: Mapping[str, Any]) -> None:
    named = {
        name.removeprefix(_WEIGHTS_PREFIX): value for name, value in weights.items() if name.startswith(_WEIGHTS_PREFIX)
    }
    check_weights(named, backbone.state_dict())
    backbone.load_state_dict(named)
