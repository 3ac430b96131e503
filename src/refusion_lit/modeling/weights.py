"""Loads a source's weights, compares them with the config, and computes digests of weights."""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from refusion_lit.modeling.diffusion_gemma import VISION, DiffusionGemmaForBlockDiffusion
from refusion_lit.modeling.formats import CheckpointFormat
from refusion_lit.modeling.source import ModelSource
from refusion_lit.modeling.stored_tensors import (
    StoredTensor,
    check_loaded_values,
    check_types,
    read_headers,
    unreadable,
    weight_files,
)
from refusion_lit.utils.errors import error_reason, last_line

_DRAFT_ADAPTER = "linear_spec_lora"
"""Directory of the adapter with which Nemotron-Labs-Diffusion drafts in linear self-speculation."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")

disable_progress_bar()  # otherwise a bar for every load interrupts a program's output


def initialise_weights(
    config: Any,  # noqa: ANN401 - one class per architecture
    dtype: torch.dtype,
    attn_implementation: str,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a model with random weights.

    Args:
        config: The transformers config.
        dtype: Type of the weights.
        attn_implementation: transformers' name of the attention implementation.
        trust_remote_code: Whether the config may name Python code in its source.

    Raises:
        ValueError: If transformers cannot build the model, for example because options contradict each other.
    """
    options = _loading_options(config, dtype, attn_implementation)
    try:  # Without the option trust_remote_code, transformers may ask on standard input.
        return _from_config(config, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # classes of transformers raise any error
        raise ValueError(
            f"backbone.config: expected a {config.model_type} model that transformers can build, got "
            f"{type(error).__name__}: {last_line(error)}; correct the options."
        ) from error


def _from_config(config: Any, *, trust_remote_code: bool, **options: Any) -> PreTrainedModel:  # noqa: ANN401 - as transformers has it
    if config.model_type == "diffusion_gemma":
        return DiffusionGemmaForBlockDiffusion._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def load_weights(source: ModelSource, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Load the model in a Hugging Face directory or hub id.

    Raises:
        ValueError: If the files are damaged, or the weights are not exactly the weights in the config's architecture.
    """
    tensors = _check_stored(source)
    published = source.published
    fused = None if published is None or not published.fused_weights else published
    loader: Any = AutoModelForCausalLM if fused is None else _splitting_class(source.config, fused)
    if source.config.model_type == "diffusion_gemma":
        loader = DiffusionGemmaForBlockDiffusion
    try:
        with _without_report():
            loaded: Any = loader.from_pretrained(
                source.name,
                config=source.config,
                # Without a generation config, transformers looks for generation options in config.json.
                generation_config=source.generation_config,
                revision=source.revision,
                **_loading_options(source.config, dtype, attn_implementation),
                trust_remote_code=source.trust_remote_code,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                key_mapping=None if published is None else published.key_mapping,
            )
    except Exception as error:  # readers of formats have errors of their own for damaged files
        raise unreadable("backbone.source", source.name, error) from error
    if (Path(source.name) / _DRAFT_ADAPTER).is_dir():
        warnings.warn(
            f"{source.name}: the adapter {_DRAFT_ADAPTER}, which only drafts, is not loaded; LinearSpeculation drafts "
            "with the model itself and writes the same text, perhaps in more forward passes.",
            stacklevel=2,
        )
    model, report = loaded
    if loader is DiffusionGemmaForBlockDiffusion and (not tensors or any(name.startswith(VISION) for name in tensors)):
        warnings.warn(f"{source.name}: the vision tower is not loaded; the model reads text only.", stacklevel=2)
    if fused is not None:
        model.__class__ = loader.__base__  # the subclass only loads
    published_name = str
    if published is not None:
        published_name = published.published_name
        model._weight_conversions = None  # otherwise transformers would save it under the family's names
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise _wrong_shape(source.name, published_name(name), stored, wanted)
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would leave them random
        raise _missing(source, [published_name(name) for name in missing])
    _check_extra(source.name, report["unexpected_keys"])
    folder = _find_directory(source)
    if not tensors:  # a hub id, whose files are here only now
        tensors = read_headers(folder, "backbone.source")
        check_types(tensors, "backbone.source", _integers(model, tensors))
    check_loaded_values(model.state_dict(), weight_files(folder))
    _record_stored_head(model)
    return model


def _record_stored_head(model: Any) -> None:  # noqa: ANN401 - one class per architecture
    """Correct a config that ties head and embedding although the files store different weights for them.

    transformers loads the stored head, but would tie head and embedding when it adds rows or builds the model again.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or not getattr(model.config, "tie_word_embeddings", False):
        return
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    names = {name for name, parameter in model.named_parameters() if parameter is head.weight}
    model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k not in names}


def _find_directory(source: ModelSource) -> Path:
    """Return a source's directory; for a hub id, the directory in the local cache."""
    if Path(source.name).is_dir():
        return Path(source.name)
    config: Any = cached_file(source.name, "config.json", revision=source.revision)
    return Path(config).parent


@contextmanager
def _without_report() -> Iterator[None]:
    """Suppress transformers' table of missing and unexpected weights, which are refused in one line."""

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)


def _loading_options(config: Any, dtype: torch.dtype, attn_implementation: str) -> dict[str, Any]:  # noqa: ANN401 - one class per architecture
    """Return transformers' options for type, attention and experts.

    ``sdpa`` has neither softcaps (Gemma-2) nor sinks (GPT-OSS): such architectures get ``eager``. Experts in float64
    get ``eager``, too, because torch's grouped products, the default, lack float64.
    """
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    lacks_sdpa = attn_implementation == "sdpa" and not getattr(architecture, "_supports_sdpa", True)
    options = {"dtype": dtype, "attn_implementation": "eager" if lacks_sdpa else attn_implementation}
    return options | ({"experts_implementation": "eager"} if dtype is torch.float64 else {})


class _SplitRows(ConversionOps):
    """Split a stored tensor's rows into several modules' parameters."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],  # noqa: ARG002 - the signature is transformers'
        target_patterns: list[str],
        **kwargs: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Return the rows for every target, as many as its parameter has."""
        [[tensor]] = input_dict.values()
        names = [kwargs["full_layer_name"].replace(target_patterns[0], target) for target in target_patterns]
        sizes = [kwargs["model"].get_parameter(name).shape[0] for name in names]
        if sum(sizes) != len(tensor):
            raise ValueError(f"expected {sum(sizes)} rows for {', '.join(names)}, got {len(tensor)}")
        return dict(zip(target_patterns, tensor.split(sizes), strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """Return the operation that joins the rows again."""
        return Concatenate(0)


def _splitting_class(config: Any, published: CheckpointFormat) -> type[PreTrainedModel]:  # noqa: ANN401 - one class per architecture
    """Return a subclass of transformers' class that splits a format's fused tensors at loading.

    transformers finds conversions by the class's name, so a conversion for the subclass does not change how
    transformers' class loads.
    """
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = f"{base.__name__}From{published.name}"
    splits = [
        WeightConverter(_in_layer(fused), [_in_layer(part) for part in parts], [_SplitRows()])
        for fused, parts in published.fused_weights.items()
    ]
    conversions = [*splits, *(get_checkpoint_conversion_mapping(config.model_type) or [])]
    register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    return type(name, (base,), {"__module__": base.__module__})


def _in_layer(name: str) -> str:
    """Return a weight's name inside its layer."""
    return name.rpartition("{}.")[2]


@torch.no_grad()
def published_weights(model: PreTrainedModel, published: CheckpointFormat) -> dict[str, Tensor]:
    """Return a model's weights with a published format's names and shapes: the inverse of loading."""
    model._weight_conversions = None  # type: ignore[assignment] - transformers then splits the experts
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, weight in revert_weight_conversion(model, model.state_dict()).items():
        published_name, rank = published.locate(name)
        parts.setdefault(published_name, []).append((rank, weight))
    ordered = {name: [weight for _, weight in sorted(ranked, key=itemgetter(0))] for name, ranked in parts.items()}
    return {name: weights[0] if len(weights) == 1 else torch.cat(weights) for name, weights in ordered.items()}


def _check_stored(source: ModelSource) -> dict[str, StoredTensor]:
    """Compare file headers with the config, before memory is allocated for weights.

    Returns the stored tensors by name; empty for a hub id.

    Raises:
        ValueError: If a file is damaged or missing; if the config asks for far more weights than the files hold, or for
            another number of experts; if a stored tensor has integers in place of floating-point numbers; if a
            published checkpoint's tensors are missing, unknown or wrongly shaped.
    """
    folder = Path(source.name)
    tensors = read_headers(folder, "backbone.source")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = source.config.get_text_config()
    if not tensors:
        return tensors
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    counts = [int(match[1]) + 1 for name in shapes if (match := _EXPERT.search(name))]
    counts += [shape[0] for name, shape in shapes.items() if name.endswith(".experts.down_proj")]
    if num_experts and counts and max(counts) != num_experts:
        raise ValueError(
            f"backbone.source: expected weights of {num_experts} experts per layer in {source.name!r}, as its config "
            f"says, got {max(counts)}. Take the config that they were trained with."
        )
    num_layers = getattr(config, "num_hidden_layers", None) or 0
    if num_layers > len(shapes):  # building the layers would take long
        raise _oversize_error(source.name, f"{num_layers} layers, in a file of {len(shapes)} tensors")
    try:
        with torch.device("meta"):
            model = _from_config(source.config, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # transformers' models raise errors of their own
        raise ValueError(
            f"backbone.source: expected options that fit together in the config of {source.name!r}, got "
            f"{type(error).__name__}: {error_reason(error)}; correct config.json."
        ) from error
    num_wanted, num_stored = sum(weight.numel() for weight in model.parameters()), sum(map(prod, shapes.values()))
    if num_wanted > 2 * num_stored:  # smaller differences are named by weight
        raise _oversize_error(source.name, f"{num_wanted:,} parameters, in files of {num_stored:,}")
    check_types(tensors, "backbone.source", _integers(model, tensors))
    if source.published is not None:
        _check_published(model, source, shapes)
    return tensors


def _check_published(model: PreTrainedModel, source: ModelSource, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare names and shapes of stored weights with a published model; transformers would first read all weights.

    Raises:
        ValueError: Naming a weight that is missing, unknown or wrongly shaped.
    """
    published = source.published
    assert published is not None
    wanted = {name: tuple(weight.shape) for name, weight in published_weights(model, published).items()}
    # If the format splits and stacks no weights, weights under transformers' names load, too.
    stored = shapes if published.fused_weights else {published.published_name(n): s for n, s in shapes.items()}
    for name in [name for name in wanted if stored.get(name, wanted[name]) != wanted[name]]:
        raise _wrong_shape(source.name, name, stored[name], wanted[name])
    tied = {published.published_name(name) for name in model.all_tied_weights_keys}
    if missing := sorted(wanted.keys() - stored.keys() - tied):
        raise _missing(source, missing)
    _check_extra(source.name, stored.keys() - wanted.keys() - _find_ignored(model, stored))


def _check_extra(source: str, names: Iterable[str]) -> None:
    """Refuse stored weights that the model lacks: transformers would drop them silently."""
    extra = sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise ValueError(
            f"backbone.source: expected only weights of the architecture in the config, got {extra[0]} and "
            f"{len(extra) - 1} more in {source!r}. Take the config that they were trained with."
        )


def _integers(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names of stored tensors that may be integers: the model's integer tensors, and ignored tensors."""
    integers = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    return integers | _find_ignored(model, names)


def _find_ignored(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names of stored tensors that transformers' class leaves out on purpose."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return {name for name in names if any(pattern.search(name) for pattern in patterns)}


def _oversize_error(name: str, wanted: str) -> ValueError:
    return ValueError(
        f"backbone.source: the weights of {name!r} do not fit its config, which asks for {wanted}. Take the config "
        "that they were trained with."
    )


def _wrong_shape(source: str, name: str, stored: Sequence[int], wanted: Sequence[int]) -> ValueError:
    return ValueError(
        f"backbone.source: the weights of {source!r} do not fit its config: {name} has the shape {tuple(stored)}, not "
        f"{tuple(wanted)}. Take the config that they were trained with."
    )


def _missing(source: ModelSource, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"backbone.source: expected all weights in {source.name!r}, got none for {names[0]} and {len(names) - 1} more. "
        f"Fetch them again"
        f"{', or take the config that they were trained with (backbone.config: {})' * bool(source.overrides)}."
    )


@torch.no_grad()
def weights_digest(model: torch.nn.Module) -> str | None:
    """Return a digest of a model's weights, 16 hexadecimal digits.

    The digest covers names and shapes of all parameters and 64 values per parameter, so it is fast for large models.
    Values are rounded to bfloat16, so that loading in float32 or bfloat16 gives the same digest.

    Args:
        model: A model; tied weights count once.

    Returns:
        The digest; ``None`` if this process does not hold all weights.
    """
    state = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if type(weight.data) is not torch.Tensor:  # sharded
            return None
        flat = weight.detach().flatten()
        count = min(len(flat), 64)
        # In integers: float32 has no room for the indices of a large embedding.
        index = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
        values = flat[index].to(torch.bfloat16).view(torch.int16).cpu().numpy()
        state.update(f"{name}{tuple(weight.shape)}".encode() + values.tobytes())
    return state.hexdigest()[:16]
