"""Models for inference from checkpoints, Hugging Face directories and hub ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from refusion_lit.checkpoints.files import (
    check_finite_weights,
    check_weights,
    is_checkpoint_file,
    is_sharded_checkpoint,
    model_source,
    read_checkpoint,
)
from refusion_lit.checkpoints.metadata import CheckpointMetadata
from refusion_lit.checkpoints.sharded import load_sharded
from refusion_lit.data.tokenizers import load_tokenizer, tokenizer_from_files
from refusion_lit.decoding import Decoder, named_decoder
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.block_drafter import FOLDER
from refusion_lit.modeling.chat_template import set_chat_options
from refusion_lit.modeling.drafter import OPTIONS_FILE, WEIGHTS_FILE, check_draft, load_drafter
from refusion_lit.modeling.load import (
    BackboneConfig,
    CheckPlan,
    DType,
    ModelPlan,
    attach,
    decoding_dtype,
    default_device,
)
from refusion_lit.modeling.lora import merge_adapters, untie
from refusion_lit.modeling.saving import HAS_DRAFTER
from refusion_lit.modeling.source import ModelSource
from refusion_lit.modeling.vocabulary import AddBos, set_add_bos
from refusion_lit.text_model import TextModel
from refusion_lit.types import AttentionKind, ModelTraits
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import require, require_choice

_WEIGHTS_PREFIX = "backbone."


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
    add_bos: AddBos | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    check: CheckPlan | None = None,
) -> TextModel:
    """Load a model with its tokenizer for inference. A checkpoint's adapters are merged into its weights.

    Args:
        source: Path of a checkpoint, a run's directory or a Hugging Face directory, or a hub id.
        dtype: Type of the weights. ``auto``: the checkpoint's type, but float32 on a CPU that has no instructions for
            a 16-bit type.
        device: The weights' device. ``auto``: a GPU that CUDA finds, else the CPU.
        revision: A hub id's pinned revision.
        trust_remote_code: Let the source run its Python code on this machine.
        overrides: Attention pattern and implementation, for directories that state neither; ``fused_body`` and
            ``batch_invariant``.
        draft: Directory of a drafter for the model, for :class:`~refusion_lit.decoding.SelfSpeculative`: written by
            this package, or in transformers' assistant layout (DFlash). By default, the drafter in the source's
            directory, if there is a drafter.
        verifier: Path or hub id of an autoregressive model with the same tokenizer, for
            :class:`~refusion_lit.decoding.APD`.
        add_bos: Whether prompts begin with the BOS token: true, false, or ``auto``, as the tokenizer itself does.
            ``None``: as stored with the model, else ``auto``.
        chat_template_kwargs: Chat template options, such as ``{"enable_thinking": False}``. ``None``: as stored
            with the model, else none.
        check: Called with config, tokenizer and traits before weights are read; raises an error to refuse the model.

    Raises:
        ValueError: If the model cannot be loaded, or its chat template does not read an option.

    >>> import refusion_lit
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean", device="cpu")
    >>> model.generate(["12+34,56+78>"], max_new_tokens=32)[0].text
    '12+34=46;56+78=134;'
    """
    fix = "give a path or a hub id"
    require(isinstance(source, str | Path), "source", "a checkpoint, a directory or a hub id", source, fix)
    require(isinstance(draft, str | Path | None), "draft", "the path of a drafter's directory", draft, "give a path")
    dtype = cast("DType", str(dtype).removeprefix("torch."))
    require_choice("dtype", dtype, ("auto", *get_args(DType)))
    device = _device(device)
    source = model_source(source)
    require(isinstance(overrides, BackboneConfig | None), "overrides", "a BackboneConfig", overrides, "create one")
    code: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    options = replace(overrides or BackboneConfig(source=source), source=source, dtype=dtype, **code)

    def check_first(plan: ModelPlan) -> None:
        if add_bos is not None:
            set_add_bos(plan.tokenizer, add_bos)
        if chat_template_kwargs is not None:
            set_chat_options(plan.tokenizer, chat_template_kwargs)
        if check is not None:
            drafts = plan.has_drafter or draft is not None or bool(plan.entry.get(HAS_DRAFTER))
            check(replace(plan, has_drafter=drafts))

    if is_checkpoint_file(source):
        model = _from_checkpoint(source, options, device, check_first)
    else:
        model = _from_directory(options, device, draft, check_first)
        stored = getattr(model.backbone.config, "refusion_lit", None) or {}
        if draft is None and stored.get(HAS_DRAFTER):
            draft = own_draft(source, revision, stored)
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
        ValueError: If the two models have different tokenizers.
    """
    vocabulary = model.tokenizer.get_vocab()
    others = other.tokenizer.get_vocab()
    differing = next((token for token, number in others.items() if vocabulary.get(token, number) != number), None)
    got = f"a tokenizer with another id for {differing!r}"
    require(differing is None, "verifier", "a model with the same tokenizer", got, "load another verifier")
    model.verifier = other.backbone


def own_draft(source: str, revision: str | None, entry: Mapping[str, Any]) -> str:
    """Return the directory of the drafter inside a model's directory.

    Args:
        source: Directory or hub id.
        revision: A hub id's pinned revision.
        entry: The entry ``refusion_lit`` in the source's config.
    """
    names = (OPTIONS_FILE, WEIGHTS_FILE)
    if entry[HAS_DRAFTER] == FOLDER:
        names = (f"{FOLDER}/config.json", f"{FOLDER}/model.safetensors")
    files = [cached_file(source, name, revision=revision) for name in names]
    return str(Path(str(files[0])).parent)


def read_default_decoder(
    source: str | Path,
    *,
    revision: str | None = None,
    checkpoint_format: str | None = None,
    attention: AttentionKind | None = None,
    block_size: int | None = None,
    draft: str | Path | None = None,
) -> Decoder:
    """Return a model's default decoder, without loading weights.

    Args:
        source: A checkpoint, a run's directory, a Hugging Face directory or a hub id.
        revision: A hub id's pinned revision.
        checkpoint_format: The source's published format.
        attention: Attention pattern, for a source that states none.
        block_size: Tokens per block, for block-causal attention.
        draft: Directory of the drafter with which the model will be loaded.

    Raises:
        ValueError: If the config or the checkpoint cannot be read.
    """
    source = model_source(source)
    if is_checkpoint_file(source):
        metadata = CheckpointMetadata.from_checkpoint(read_checkpoint(source, mmap=True), source)
        entry = metadata.entry
        has_drafter = metadata.drafter is not None
    else:
        opened = ModelSource.open(source, option="ckpt_path", checkpoint_format=checkpoint_format, revision=revision)
        entry = opened.entry
        has_drafter = bool(entry.get(HAS_DRAFTER))
    traits = ModelTraits.from_dict(entry)
    if attention is not None and "attention" not in entry:
        traits = replace(traits, attention=attention, block_size=block_size)
    return named_decoder(traits, entry, has_drafter=has_drafter or draft is not None)


def _device(name: str | torch.device) -> torch.device:
    """Return the device with a name; refuse devices that this machine lacks."""
    require(str(name).partition(":")[0] != "meta", "device", "a device that computes", str(name), "use cpu or cuda")
    try:
        device = torch.device(default_device() if name == "auto" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is missing
        got = f"{str(name)!r} ({error_reason(error)})"
        raise ValueError(f"device: expected a device of this machine, got {got}; use cpu, or auto.") from error
    return device


def _from_checkpoint(source: str, options: BackboneConfig, device: torch.device, check: CheckPlan) -> TextModel:
    """Return a checkpoint's model, with merged adapters."""
    model = load_checkpoint(source, options, device, check)
    adapted = model.backbone
    model.backbone = Backbone(
        merge_adapters(adapted.model),
        adapted.traits,
        adapted.special_tokens,
        fused_body=options.fused_body,
        batch_invariant=options.batch_invariant,
    )
    if adapted.drafter is not None:
        attach(model.backbone, adapted.drafter)
    return model


def _from_directory(
    options: BackboneConfig, device: torch.device, draft: str | Path | None, check: CheckPlan
) -> TextModel:
    """Return the model of a Hugging Face directory or a hub id, without a drafter; refuse a draft of another model."""
    source = options.open_source("ckpt_path")
    config = source.config  # refuses an unknown architecture before its tokenizer
    prompt_template = source.prompt_template
    if options.dtype == "auto":
        options = replace(options, dtype=decoding_dtype(config, device))
    tokenizer = load_tokenizer(source)
    rules = ", ".join(f"{name}: {value}" for name, value in source.ignored_rules.items())
    if rules:
        warnings.warn(f"{source.name}: no decoder follows these rules of the generation config: {rules}.", stacklevel=2)
    if draft is not None:
        check_draft(draft, config, tokenizer.get_vocab())
    backbone = options.build(
        tokenizer, source=source, check=lambda plan: check(replace(plan, prompt_template=prompt_template))
    )
    stored = getattr(backbone.config, "refusion_lit", None) or {}
    stated = stored.get("attention")
    is_kept = None in (stated, options.attention) or stated == options.attention
    require(is_kept, "attention", f"{stated}, which the model was trained with", options.attention, "leave it out")
    return TextModel(backbone, tokenizer, prompt_template)


def load_checkpoint(
    path: str | Path,
    options: BackboneConfig | None = None,
    device: str | torch.device = "cpu",
    check: CheckPlan | None = None,
) -> TextModel:
    """Rebuild a checkpoint's model as it was trained, with its adapters unmerged.

    Args:
        path: The checkpoint, sharded or not.
        options: Gives ``dtype`` and ``attn_implementation``; ``attention`` and ``block_size`` are ``None`` or equal
            the stored values.
        device: Device of the model, for a ``dtype`` of ``auto``.
        check: See :func:`load`.

    Raises:
        ValueError: If the checkpoint cannot be read, its weights do not fit its metadata, or it was trained with
            another attention pattern.
    """
    checkpoint = read_checkpoint(path, mmap=True)
    metadata = CheckpointMetadata.from_checkpoint(checkpoint, path)
    for name in ("attention", "block_size"):
        stored = getattr(metadata.traits, name)
        got = getattr(options, name, None)
        require(got in (None, stored), name, f"{stored}, which the checkpoint was trained with", got, "leave it out")
    tokenizer = tokenizer_from_files(metadata.tokenizer_files, path)
    if options is not None and options.dtype == "auto":
        options = replace(options, dtype=decoding_dtype(metadata.architecture, device))
    backbone = _rebuild(metadata, tokenizer, options, check)
    if is_sharded_checkpoint(path):
        load_sharded(path, {_WEIGHTS_PREFIX + name: tensor for name, tensor in backbone.state_dict().items()})
        check_finite_weights(backbone.state_dict(), path)
    else:
        _restore_weights(backbone, checkpoint["state_dict"], path)
    return TextModel(backbone, tokenizer, metadata.prompt_template)


def restore_metadata(
    checkpoint: dict[str, Any], backbone: Backbone, tokenizer: PreTrainedTokenizerBase | None, *, resumes: bool
) -> None:
    """Prepare a training module's backbone for loading a checkpoint's weights.

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
            f"{len(tokenizer)} other tokens. Take the config and the data that the checkpoint was trained with."
        )
    backbone.traits = metadata.traits
    if metadata.adapters is not None and backbone.adapters is None and not resumes:
        adapted = _rebuild(metadata, stored, None)
        _restore_weights(adapted, checkpoint["state_dict"])
        adapted.model = merge_adapters(adapted.model)
        if not adapted.config.tie_word_embeddings:
            untie(backbone.model)
        checkpoint["state_dict"] = {_WEIGHTS_PREFIX + name: value for name, value in adapted.state_dict().items()}


def _rebuild(
    metadata: CheckpointMetadata,
    tokenizer: PreTrainedTokenizerBase,
    options: BackboneConfig | None,
    check: CheckPlan | None = None,
) -> Backbone:
    """Build the model described by the metadata, with random weights."""

    def check_first(plan: ModelPlan) -> None:
        if check is not None:
            check(replace(plan, prompt_template=metadata.prompt_template))

    config = metadata.backbone_config()
    if options is not None:
        config = replace(config, dtype=options.dtype, attn_implementation=options.attn_implementation)
    backbone = config.build(tokenizer, seed=0, check=check_first)  # leaves the global generator as it is
    backbone.adapters = metadata.adapters
    if backbone.drafter is not None and metadata.drafter is not None:
        backbone.drafter.base = metadata.drafter.base
    return backbone


def _restore_weights(backbone: Backbone, weights: Mapping[str, Any], path: str | Path | None = None) -> None:
    named = {
        name.removeprefix(_WEIGHTS_PREFIX): value for name, value in weights.items() if name.startswith(_WEIGHTS_PREFIX)
    }
    check_weights(named, backbone.state_dict(), path)
    backbone.load_state_dict(named)
