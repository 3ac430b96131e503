"""Builds backbones: from a config with random weights, or from a Hugging Face directory or hub id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from refusion_lit.modeling.backbone import Backbone, get_body
from refusion_lit.modeling.block_drafter import BlockDrafter, BlockDrafterOptions
from refusion_lit.modeling.config import new_config, read_traits, sliding_window
from refusion_lit.modeling.drafter import Drafter, DrafterOptions, check_draft, load_drafter
from refusion_lit.modeling.fused.body import is_known
from refusion_lit.modeling.interface import TextLimits
from refusion_lit.modeling.lora import Adapters, LoraOptions, add_adapters
from refusion_lit.modeling.source import ModelSource
from refusion_lit.modeling.vocabulary import fit_vocabulary, mask_is_untrained, read_special_tokens
from refusion_lit.modeling.weights import initialise_weights, load_weights
from refusion_lit.types import ModelTraits
from refusion_lit.utils.require import require

AttentionImplementation = Literal["sdpa", "flex_attention"]
DType = Literal["float32", "float64", "bfloat16", "float16"]

_BUILDING = threading.RLock()
"""Held while a model is built.

transformers then replaces methods of its classes and functions of torch, and afterwards puts back what it found: in a
second thread, the replacements."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan(TextLimits):
    """A model's config and tokenizer, for checks before weights are read.

    Attributes:
        max_positions: See :class:`~refusion_lit.modeling.interface.TextLimits`.
        window: See there.
        traits: What the model was trained to do.
        tokenizer: The tokenizer.
        entry: The config's entry ``refusion_lit``, which may name a decoder.
        prompt_template: Turns a query into a prompt if the tokenizer has no chat template.
        has_drafter: Whether the model gets a drafter.
    """

    max_positions: int | None
    window: int | None
    traits: ModelTraits
    tokenizer: PreTrainedTokenizerBase
    entry: Mapping[str, Any]
    prompt_template: str = "{query}"
    has_drafter: bool = False


CheckPlan = Callable[[ModelPlan], None]
"""Raises an error for users if a model does not fit the caller's purpose."""


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Options of a backbone: the source of its weights, and how they are trained and decoded.

    Attributes:
        source: A local Hugging Face directory or a hub id to load weights from; ``None`` for random weights.
        config: Options that replace options in the source's transformers config. With ``source: null``, the whole
            config, which needs ``model_type``. A whole config sets the base of rotary positions with ``rope_theta``,
            a replacement with ``rope_parameters`` (``{rope_type: default, rope_theta: 10000.0}``).
        revision: A hub id's pinned revision.
        checkpoint_format: The source's published format (see :data:`~refusion_lit.modeling.formats.FORMATS`);
            ``None`` derives the format from ``model_type``.
        attention: Attention pattern; ``None``: the pattern in the source's config, causal by default. ``fit`` trains
            with the objective's pattern and refuses others.
        block_size: Number of tokens in a block, with ``attention: block_causal``.
        dtype: Type of the weights; ``auto``: see :func:`decoding_dtype`.
        attn_implementation: Implementation of attention (``attn_implementation`` in transformers).
            ``flex_attention`` is for training on GPUs; the fused backbone then decodes with ``sdpa``. With ``sdpa``,
            architectures that lack it in transformers, such as Gemma 2, use ``eager``.
        fused_body: Decode with the fused backbone if it supports the architecture (Qwen2, Qwen3, Llama with
            ``attn_implementation: sdpa`` or ``flex_attention``, weights neither adapted nor quantised nor sharded). The
            hidden states are equal up to rounding, and small models decode about twice as fast. Training and
            checkpoints do not depend on this option.
        batch_invariant: Decode so that a token's logits are bitwise identical alone, in a batch, and together with
            drafts, in every type. Slower (see Speed in the documentation), and for CPUs only. It needs an architecture
            of ``fused_body``, widths that are multiples of 32, and ``attn_implementation: sdpa``.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        lora: Train low-rank adapters instead of all weights.
        drafter: Freeze the model and train a drafter for it, with the objective ``GatedDraft``.
        block_drafter: Freeze the model and train a block drafter for it (DFlash), with the objective ``BlockDraft``.
        draft: Directory of a drafter to train further, for example on other texts, instead of a new drafter.
        trust_remote_code: Allow the source to run its Python code on this machine.

    >>> import refusion_lit
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = BackboneConfig(config={"model_type": "llama", **sizes})
    >>> tokenizer = refusion_lit.CharacterTokenizer(characters="0123456789+").build(None)
    >>> config.build(tokenizer, seed=0).special_tokens.vocab_size
    14
    """

    source: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    checkpoint_format: str | None = None
    attention: Literal["causal", "bidirectional", "block_causal"] | None = None
    block_size: int | None = None
    dtype: DType | Literal["auto"] = "float32"
    attn_implementation: AttentionImplementation = "sdpa"
    fused_body: bool = True
    batch_invariant: bool = False
    gradient_checkpointing: bool = False
    lora: LoraOptions | None = None
    drafter: DrafterOptions | None = None
    block_drafter: BlockDrafterOptions | None = None
    draft: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.source is None and "model_type" not in self.config:
            raise ValueError(
                "backbone: expected a source (directory or hub id) or a config with model_type (for example "
                f"'qwen3'), got source=None and config={self.config!r}. Set one of them (of two "
                "config files, the later one's backbone.config counts alone)."
            )
        is_pinned = self.revision is not None and self.source is not None and Path(self.source).exists()
        expected = "none for what is on this machine"
        require(not is_pinned, "revision", expected, self.revision, "leave it out, or give a hub id as source")
        if self.attention is not None or self.block_size is not None:
            # Refuses a block size without blocks, and blocks without a size.
            ModelTraits(attention=self.attention or "causal", block_size=self.block_size)
        trained = [name for name in ("lora", "drafter", "block_drafter", "draft") if getattr(self, name) is not None]
        expected = "one of lora, drafter and block_drafter (new weights) and draft (an exported drafter)"
        require(len(trained) <= 1, "backbone", expected, " and ".join(trained), "train one of them")
        fits = not self.gradient_checkpointing or trained in ([], ["lora"])
        fix = "set it to false: the frozen model's forward keeps no gradients"
        require(fits, "backbone.gradient_checkpointing", "false with a drafter", self.gradient_checkpointing, fix)

    def open_source(self, option: str = "backbone.source") -> ModelSource:
        """Read the source's config.

        Args:
            option: The option that named the source, for messages.

        Raises:
            ValueError: If the source cannot be read.
        """
        assert self.source is not None
        return ModelSource.open(
            self.source,
            option=option,
            checkpoint_format=self.checkpoint_format,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            overrides=self.config,
        )

    def build(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int | None = None,
        source: ModelSource | None = None,
        is_sharded: bool = False,
        check: CheckPlan | None = None,
    ) -> Backbone:
        """Build the backbone for a tokenizer.

        Embedding and head get a row for every token; new rows start as the mean of the existing rows.

        Args:
            tokenizer: The tokenizer; its mask token becomes the model's mask token.
            seed: Seeds random weights without changing the global generator's state.
            source: The source, if the caller has opened it already.
            is_sharded: Whether the caller will shard the weights over processes.
            check: Called before weights are read or drawn.

        Raises:
            ValueError: If the source cannot be loaded or is not supported, or by ``check``.
        """
        if source is None and self.source is not None:
            source = self.open_source()
        config = new_config(self.config, tokenizer) if source is None else source.config
        if config.model_type == "diffusion_gemma":
            self._check_shared_weights(is_sharded=is_sharded)
        name = decoding_dtype(config, default_device()) if self.dtype == "auto" else self.dtype
        if self.draft is not None:
            check_draft(self.draft, config, tokenizer.get_vocab())
        dtype, attention = getattr(torch, name), self.attn_implementation
        traits = _choose_traits(self, config, tokenizer)
        if check is not None:
            text = config.get_text_config()
            plan = ModelPlan(
                max_positions=getattr(text, "max_position_embeddings", None),
                window=sliding_window(text),
                traits=traits,
                tokenizer=tokenizer,
                entry=getattr(config, "refusion_lit", None) or {},
                has_drafter=any(part is not None for part in (self.drafter, self.block_drafter, self.draft)),
            )
            check(plan)
        with _BUILDING, torch.random.fork_rng(devices=(), enabled=seed is not None):
            if seed is not None:
                torch.default_generator.manual_seed(seed)  # the CPU draws all initial weights
            if source is None:
                model = initialise_weights(config, dtype, attention, trust_remote_code=self.trust_remote_code)
            else:
                model = load_weights(source, dtype, attention)
            new_token_ids = fit_vocabulary(model, tokenizer, pretrained=source is not None)
            if self.gradient_checkpointing:
                _enable_checkpointing(model)
            if self.lora is not None:
                model = add_adapters(model, self.lora)
            drafter = _make_drafter(self, model, tokenizer, new_token_ids)
        decoding = {"fused_body": self.fused_body, "batch_invariant": self.batch_invariant}
        backbone = Backbone(model, traits, read_special_tokens(tokenizer), **decoding)
        if source is not None:
            backbone.new_token_ids = new_token_ids
        if drafter is not None:
            attach(backbone, drafter)
        if self.lora is not None:
            backbone.adapters = Adapters(
                options=self.lora,
                base=self.source,
                revision=self.revision,
                config_overrides=self.config if source is not None else {},
                new_token_ids=new_token_ids,
            )
        return backbone

    def _check_shared_weights(self, *, is_sharded: bool) -> None:
        """Refuse low-rank adapters and sharding if the model's encoder and decoder share weights."""
        expected = "null for a model whose encoder and decoder share weights"
        require(self.lora is None, "backbone.lora", expected, self.lora, "train all weights")
        expected = "a strategy with whole weights for a model whose encoder and decoder share weights"
        require(not is_sharded, "trainer.strategy", expected, "a strategy that shards weights", "use the strategy ddp")


def _choose_traits(options: BackboneConfig, config: Any, tokenizer: PreTrainedTokenizerBase) -> ModelTraits:  # noqa: ANN401 - one class per architecture
    """Return the weights' traits by the config, with the attention pattern in the options."""
    traits = read_traits(getattr(config, "refusion_lit", None) or {}, options.source)
    if options.attention is not None:
        traits = replace(
            traits,
            attention=options.attention,
            block_size=options.block_size,
            prompt_is_block=traits.prompt_is_block and options.attention == "block_causal",
        )
    if options.source is not None and traits.predictions is None and mask_is_untrained(tokenizer):
        return replace(traits, predictions=("next_token",))  # the weights were never trained for masks
    return traits


def _make_drafter(
    options: BackboneConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_token_ids: Sequence[int]
) -> Drafter | BlockDrafter | None:
    """Return the drafter to train, and freeze the model; ``None`` if the options name no drafter."""
    if options.draft is not None:
        drafter = load_drafter(get_body(model.requires_grad_(False)), options.draft)
        drafter.base = options.source
        return drafter
    if options.block_drafter is not None:
        special = read_special_tokens(tokenizer)
        mask = special.mask_token_id
        # The model's own files, which other programs read, lack the row of a new mask token.
        mask = special.pad_token_id if mask is None or mask in new_token_ids else mask
        config = options.block_drafter.assistant_config(model.config, mask)
        block_drafter = BlockDrafter(config, options.source)
        like = next(model.requires_grad_(False).parameters())
        return block_drafter.to(like.device)
    if options.drafter is None:
        return None
    return Drafter(get_body(model.requires_grad_(False)), options.drafter, options.source)


def attach(backbone: Backbone, drafter: Drafter | BlockDrafter) -> None:
    """Give a backbone a drafter. The drafter's masks get the ids after the embedding's last row.

    Raises:
        ValueError: If the model decodes with transformers' forward, which cannot apply adapters to masks only. With a
            block drafter: if the model cannot compute positions beyond its context, where the last block may end.
    """
    is_block = isinstance(drafter, BlockDrafter)
    fits = not (is_block and backbone.learns_positions)
    got = f"{type(backbone.body).__name__} with learnt positions or a sliding window"
    require(fits, "drafter", "a model with rotary positions and full attention", got, "leave the drafter out")
    has_gate = backbone.fused_body and is_known(backbone.body)
    expected = "a Llama, Qwen2 or Qwen3 model decoded with fused_body: true"
    got = f"{type(backbone.body).__name__}, fused_body: {backbone.fused_body}"
    require(has_gate or is_block, "drafter", expected, got, "change these options, or leave the drafter out")
    first = backbone.model.get_input_embeddings().weight.shape[0]
    masks = tuple(range(first, first + drafter.num_masks))
    backbone.drafter = drafter
    backbone.special_tokens = replace(backbone.special_tokens, draft_token_ids=masks, drafts_block=is_block)


def default_device() -> str:
    """Return the device that commands use by default: a GPU that CUDA finds, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def decoding_dtype(config: Any, device: str | torch.device) -> DType:  # noqa: ANN401 - one class per architecture
    """Return the default type for decoding: the type in the config.

    A CPU without instructions for a 16-bit type decodes faster in float32, so it gets float32.

    Args:
        config: The transformers config, or its values.
        device: The model's device.
    """
    values = config if isinstance(config, Mapping) else {"dtype": getattr(config, "dtype", None)}
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    has_instructions = name == "bfloat16" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    if name in ("bfloat16", "float16") and torch.device(device).type == "cpu" and not has_instructions:
        return "float32"
    return cast("DType", name) if name in get_args(DType) else "float32"


def _enable_checkpointing(model: PreTrainedModel) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.20 or so on
    if enable is None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        enable()
    # It also hooks the embedding, for reentrant checkpointing, and the fused backbone takes no hooked body.
    model.disable_input_require_grads()
