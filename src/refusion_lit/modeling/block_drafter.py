"""Block drafter (DFlash): a small network that drafts a block of tokens from a frozen model's hidden states.

The network is transformers' assistant ``muse_glimmer_assistant``, so its directories also load in transformers. Its
queries are the last token and a block of masks. Its keys and values are computed from the model's hidden states, token
by token. They are stored in the model's KV cache as further layers, at the token's index: moving, copying and
overwriting entries then applies to both networks.

Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
    rotate_half,
)

from refusion_lit.modeling.config import check_num_layers
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.stored_tensors import check_types, load_checked, read_headers, weight_files
from refusion_lit.modeling.transformers_forward import LibraryCache
from refusion_lit.modeling.visibility import AttentionMask, as_mask
from refusion_lit.modeling.weights import weights_digest
from refusion_lit.utils.errors import error_reason
from refusion_lit.utils.require import check_options, require

MODEL_TYPE = MuseGlimmerAssistantConfig.model_type
FOLDER = "drafter"
"""A block drafter's folder in its model's directory."""
ENTRY = "refusion_lit"
"""Key in the assistant's config for values that transformers does not know: the model's name and digest."""
_CONFIG = "config.json"
_OPTIONS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "sliding_window", "layer_types", "hidden_act",
    "bos_token_id", "eos_token_id", "pad_token_id", "block_size", "mask_token_id", "target_layer_ids",
)  # fmt: skip
"""Options in the assistant's config that define what the network computes."""


@dataclass(frozen=True, kw_only=True)
class BlockDrafterOptions:
    """Options of a new block drafter. Widths, heads and rotary embeddings are taken from the model.

    Attributes:
        block_size: Tokens per block, at least 2: the last token and the masks after it.
        num_layers: The drafter's number of layers, at least 1.
        target_layer_ids: Model layers, counted from 0, whose outputs the drafter reads. ``None``: as many layers as the
            drafter has, spaced evenly from the model's second layer to its third from the end.
        config: Options of transformers' ``MuseGlimmerAssistantConfig`` that replace the derived options.
    """

    ranges = {"block_size": 2, "num_layers": 1}
    block_size: int = 16
    num_layers: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self, "backbone.block_drafter.")
        if self.target_layer_ids is not None:
            object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))

    def assistant_config(self, target: Any, mask_token_id: int) -> MuseGlimmerAssistantConfig:  # noqa: ANN401 - one class per architecture
        """Return the assistant's config for a model.

        Args:
            target: The model's config.
            mask_token_id: Token whose embedding stands for a mask.
        """
        rope = getattr(target, "rope_parameters", None) or {}
        eos = target.eos_token_id
        derived = {
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": target.num_attention_heads,
            "num_key_value_heads": getattr(target, "num_key_value_heads", None) or target.num_attention_heads,
            "head_dim": getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
            "max_position_embeddings": getattr(target, "max_position_embeddings", None) or 131072,
            "layer_types": ["full_attention"] * self.num_layers,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": eos[0] if isinstance(eos, list) else eos,
            "pad_token_id": target.pad_token_id,
            "block_size": self.block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(self.target_layer_ids or _spread(self.num_layers, target.num_hidden_layers)),
        }
        unknown = next((name for name in self.config if name not in _OPTIONS), None)
        expected = f"options among {', '.join(_OPTIONS)}"
        require(unknown is None, "backbone.block_drafter.config", expected, unknown, "leave it out")
        return MuseGlimmerAssistantConfig(**{**derived, **self.config})


def _spread(num_chosen: int, num_layers: int) -> list[int]:
    """Return model layers, spaced evenly from the second to the third from the end."""
    first = min(1, num_layers - 1)
    last = max(num_layers - 3, first)
    return sorted({round(first + i * (last - first) / max(num_chosen - 1, 1)) for i in range(num_chosen)})


class BlockDrafter(nn.Module):
    """Transformers' assistant network, with keys and values in the drafted model's KV cache.

    Args:
        config: The assistant's config; the caller has checked that it fits the model.
        base: The model's directory or hub id; ``None`` if its weights are random.

    Attributes:
        network: Transformers' network.
        base: The model's directory or hub id; ``None`` if its weights are random.
    """

    def __init__(self, config: MuseGlimmerAssistantConfig, base: str | None = None) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.network = MuseGlimmerAssistantModel(config)
        self.base = base

    @property
    def options(self) -> BlockDrafterOptions:
        """Options that build the same network for any model."""
        config = self.network.config
        values = {name: getattr(config, name) for name in _OPTIONS}
        sizes = {"block_size": config.block_size, "num_layers": config.num_hidden_layers}
        return BlockDrafterOptions(target_layer_ids=self.target_layer_ids, config=values, **sizes)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Model layers that the network reads."""
        return tuple(self.network.config.target_layer_ids or ())

    @property
    def num_layers(self) -> int:
        """Number of the network's layers, and of the KV cache layers that it needs."""
        return self.network.config.num_hidden_layers

    @property
    def num_masks(self) -> int:
        """Number of masks in a block."""
        return self.network.config.block_size - 1

    def storing_context(
        self, run: Callable[..., Tensor], first_layer: int
    ) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Extend a model's forward: it also stores the drafter's keys and values for its tokens.

        Args:
            run: The model's forward; takes a dict as its last argument and fills in the layers' outputs.
            first_layer: Number of the drafter's first layer in the cache.
        """
        layers = self.target_layer_ids

        def states(ids: Tensor, positions: Tensor, mask: AttentionMask | None, cache: KVCache | None = None) -> Tensor:
            if cache is None:
                return run(ids, positions, mask)
            outputs: dict[int, Tensor] = dict.fromkeys(layers, ids)
            hidden = run(ids, positions, mask, cache, outputs)
            flat = positions.flatten()
            flat = flat if cache.source_index is None else flat[cache.source_index]
            self._store(torch.cat([outputs[layer] for layer in layers], -1), flat, cache, first_layer)
            return hidden

        return states

    def _store(
        self, features: Float[Tensor, "token width"], positions: Int[Tensor, " token"], cache: KVCache, first_layer: int
    ) -> None:
        """Write the drafter's keys and values for a text into the cache, at the indices of the model's forward."""
        network = self.network
        context = network.encoder(features.to(network.dtype))
        cos, sin = (angles[0, :, None] for angles in network.rotary_emb(context[None], positions[None]))
        for number, layer in enumerate(network.layers):
            attention: Any = layer.self_attn
            shape = (len(context), -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(shape))
            keys = keys * cos + rotate_half(keys) * sin
            cache.store(first_layer + number, keys, attention.v_proj(context).view(shape))

    def draft_runner(
        self, embedding: nn.Module, first_mask: int, first_layer: int
    ) -> Callable[..., Float[Tensor, "batch token hidden"]]:
        """Return the network's forward over blocks; it takes the arguments of :meth:`LanguageModel.hidden_states`.

        A token's cache index must be its position, because sliding layers measure distances by the index.

        Args:
            embedding: The model's embedding.
            first_mask: Ids from here on are masks.
            first_layer: Number of the network's first layer in the cache.
        """
        network = self.network
        width = len(self.target_layer_ids) * network.config.hidden_size

        def states(ids: Tensor, positions: Tensor, mask: AttentionMask, cache: KVCache) -> Tensor:
            embedded = embedding(ids.masked_fill(ids >= first_mask, network.config.mask_token_id)).to(network.dtype)
            visible = as_mask(mask, ids.device)
            keys = torch.arange(visible.shape[-1], device=ids.device)
            output = network(
                noise_embeds=embedded,
                context_hidden_states=embedded.new_empty(len(ids), 0, width),
                position_ids=positions,
                attention_mask=self._masks(visible, positions, keys.expand(len(ids), -1)),
                past_key_values=LibraryCache(cache, first_layer),
            )
            return output.last_hidden_state

        return states

    def _masks(
        self,
        visible: Bool[Tensor, "batch token key"],
        positions: Int[Tensor, "batch token"],
        key_positions: Int[Tensor, "batch key"],
    ) -> dict[str, Tensor]:
        """Return masks for full layers, and for sliding layers: keys at most ``sliding_window`` places away."""
        is_near = (positions[:, :, None] - key_positions[:, None]).abs() <= self.network.config.sliding_window
        sliding = visible & is_near
        sliding = sliding.where(sliding.any(-1, keepdim=True), visible)  # padding, which would see nothing
        return {"full_attention": visible[:, None], "sliding_attention": sliding[:, None]}

    def training_states(
        self,
        body: Any,  # noqa: ANN401 - a transformers model
        input_ids: Int[Tensor, "batch token"],
        position_ids: Int[Tensor, "batch token"],
        length: int,
    ) -> Float[Tensor, "batch token hidden"]:
        """Return hidden states: for the text without gradients, for masks with the network's gradients.

        Args:
            body: The model's body.
            input_ids: The text, then the masks of blocks, block by block.
            position_ids: Position of each token. A block's anchor is the text's token before its first mask.
            length: Number of tokens of the text.
        """
        network = self.network
        layers = self.target_layer_ids
        with torch.no_grad():
            text = body(
                input_ids=input_ids[:, :length],
                position_ids=position_ids[:, :length],
                attention_mask=torch.ones_like(input_ids[:, :length]),
                use_cache=False,
                output_hidden_states=True,
            )
            features = torch.cat([text.hidden_states[layer + 1] for layer in layers], -1).to(network.dtype)
        batch = len(input_ids)
        firsts = position_ids[:, length :: self.num_masks]
        anchors = (firsts - 1).clamp(0, length - 1)
        blocks = anchors[..., None] + torch.arange(self.num_masks + 1, device=input_ids.device)
        positions = torch.cat((position_ids[:, :length], blocks.flatten(1)), 1)
        block_index = torch.arange(anchors.shape[1], device=input_ids.device).repeat_interleave(self.num_masks + 1)
        # A block sees the text before its anchor, and the whole block.
        before = position_ids[:, None, :length] < anchors.repeat_interleave(self.num_masks + 1, 1)[..., None]
        same = (block_index[:, None] == block_index).expand(batch, -1, -1)
        ids = torch.full_like(blocks, network.config.mask_token_id)
        ids[..., 0] = input_ids[:, :length].gather(1, anchors)
        output = network(
            noise_embeds=body.get_input_embeddings()(ids.flatten(1)).to(network.dtype),
            context_hidden_states=features,
            position_ids=positions,
            attention_mask=self._masks(torch.cat((before, same), -1), positions[:, length:], positions),
        )
        hidden = output.last_hidden_state.unflatten(1, blocks.shape[1:])[:, :, 1:].flatten(1, 2)
        return torch.cat((text.last_hidden_state, hidden.to(text.last_hidden_state.dtype)), 1)


def is_block_drafter(directory: str | Path) -> bool:
    """Whether a directory is a drafter in transformers' assistant layout."""
    return _read_config(Path(directory)).get("model_type") == MODEL_TYPE


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``; empty if the file is no JSON object."""
    try:
        values = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def check_block_drafter(directory: str | Path, target: Any) -> MuseGlimmerAssistantConfig:  # noqa: ANN401 - one class per architecture
    """Return the config in an assistant's directory; refuse a directory that does not fit the model.

    Only configs and the headers of the weights are read.

    Args:
        directory: A directory in transformers' assistant layout.
        target: The model's config.

    Raises:
        ValueError: If the files are damaged, tensors are missing, or the drafter belongs to another model.
    """
    folder = Path(directory)
    check_num_layers(_read_config(folder), f"draft: {folder}")
    try:
        config = MuseGlimmerAssistantConfig.from_pretrained(folder)
        if not config.target_layer_ids:
            raise ValueError(f"target_layer_ids {config.target_layer_ids}")
        share = (config.rope_parameters or {}).get("partial_rotary_factor")
        if share not in (None, 1):
            raise ValueError(f"partial_rotary_factor {share}")
        with torch.device("meta"):
            wanted = {name: tuple(weight.shape) for name, weight in BlockDrafter(config).network.named_parameters()}
    except Exception as error:  # transformers' configs and models raise errors of their own
        expected = "options of an assistant that fit together"
        raise _draft_error(folder / _CONFIG, expected, error_reason(error), "fetch the file again") from error
    name = f"{target.model_type}, the model"
    size, num_layers, num_ids = target.hidden_size, target.num_hidden_layers, target.vocab_size
    fix = "give the drafter of this model"
    if config.hidden_size != size:
        raise _draft_error(
            folder, f"a drafter of hidden size {size} for {name}", f"hidden size {config.hidden_size}", fix
        )
    layers = config.target_layer_ids
    if not all(0 <= layer < num_layers for layer in layers):
        expected = f"a drafter that reads layers 0 to {num_layers - 1} of {name}"
        raise _draft_error(folder, expected, f"target_layer_ids {layers}", fix)
    if not 0 <= config.mask_token_id < num_ids:
        expected = f"a drafter of the vocabulary of {num_ids} tokens of {name}"
        raise _draft_error(folder, expected, f"mask_token_id {config.mask_token_id}", fix)
    context = config.max_position_embeddings
    if not 2 <= config.block_size <= context:
        expected = f"blocks of 2 to {context} tokens, its context"
        raise _draft_error(folder, expected, f"block_size {config.block_size}", "correct config.json")
    tensors = read_headers(folder, "draft")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if not shapes:
        raise _draft_error(folder, "safetensors files with weights", "none that can be read", "fetch it again")
    for weight in sorted({*wanted, *shapes}):
        if shapes.get(weight) != wanted.get(weight):
            expected = f"weights as config.json says, with {weight} of shape {wanted.get(weight)}"
            raise _draft_error(folder, expected, f"{shapes.get(weight)}", "fetch it again")
    check_types(tensors, "draft")
    return config


def _draft_error(place: Path, expected: str, got: str, fix: str) -> ValueError:
    return ValueError(f"draft: expected {expected}, got {got} in {place}; {fix}.")


def check_drafter_vocabulary(directory: str | Path, vocabulary: Mapping[str, int]) -> None:
    """Refuse a drafter whose directory has a tokenizer with different ids.

    Args:
        directory: The drafter's directory.
        vocabulary: The model tokenizer's ids by token.

    Raises:
        ValueError: Naming a token that has another id.
    """
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        return
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        tokens = values["model"]["vocab"]
        ids = dict(tokens) if isinstance(tokens, dict) else {token: number for number, (token, _) in enumerate(tokens)}
        ids |= {token["content"]: token["id"] for token in values.get("added_tokens") or ()}
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise _draft_error(file, "a tokenizer", error_reason(error), "fetch it again") from error
    other = next((token for token, number in ids.items() if vocabulary.get(token, number) != number), None)
    if other is not None:
        expected = f"a drafter with the model's vocabulary, in which {other!r} has id {vocabulary[other]}"
        raise _draft_error(file, expected, f"id {ids[other]}", "give the drafter of this model")


def check_base_weights(body: nn.Module, digest: object, expected: str) -> None:
    """Refuse a model whose weights differ from the weights that a drafter was trained for.

    Args:
        body: The model's body.
        digest: The digest that the drafter's directory records; ``None`` if it records none.
        expected: The drafter's model, for messages.

    Raises:
        ValueError: If the digests differ.
    """
    actual = weights_digest(body.get_submodule("layers"))  # without the embedding: rows may have been added
    # In float16, the weights are rounded, and the digest rounds them again to bfloat16, so that the digest differs.
    is_rounded_twice = any(weight.dtype == torch.float16 for weight in body.parameters())
    got = f"weights {actual}, for which few drafts would be accepted"
    fits = digest in (None, actual) or is_rounded_twice
    fix = "load that model, or train a drafter for this one"
    require(fits, "draft", f"{expected}, with weights {digest}", got, fix)


def load_block_drafter(body: nn.Module, directory: str | Path) -> BlockDrafter:
    """Load a directory in transformers' assistant layout.

    Args:
        body: The body of the model to draft for.
        directory: The directory.

    Raises:
        ValueError: As :func:`check_block_drafter`, or if the drafter was trained for other weights.
    """
    config = check_block_drafter(directory, body.config)
    entry = getattr(config, ENTRY, None) or {}
    entry = entry if isinstance(entry, dict) else {}
    check_base_weights(body, entry.get("base_weights"), f"the model of {directory} ({entry.get('base')})")
    try:
        weights = load_checked(weight_files(Path(directory)))
    except (OSError, SafetensorError) as error:
        raise _draft_error(Path(directory), "weights", error_reason(error), "fetch it again") from error
    drafter = BlockDrafter(config, entry.get("base"))
    drafter.network.load_state_dict(weights)
    like = next(body.parameters())
    return drafter.to(like.device, like.dtype)


def save_block_drafter(drafter: BlockDrafter, body: nn.Module, directory: Path) -> None:
    """Write a drafter in transformers' assistant layout, with its model's name and digest.

    Args:
        drafter: The drafter.
        body: Its model's body.
        directory: An existing directory.
    """
    config = drafter.network.config
    setattr(config, ENTRY, {"base": drafter.base, "base_weights": weights_digest(body.get_submodule("layers"))})
    config.architectures = [type(drafter.network).__name__]
    drafter.network.save_pretrained(directory)
