"""Where a backbone comes from: a config, a local directory, or a hub id."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from refusion_lit.modeling.backbone import Backbone, check_compilable
from refusion_lit.types import ModelTraits, SpecialTokens

disable_progress_bar()  # a bar for every load would be printed between a program's own lines

AttentionImplementation = Literal["sdpa", "eager", "flex_attention", "flash_attention_2"]
_NEW_MASK = "mask_token_is_new"
_TEMPLATE = "prompt_template"
DType = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters through peft (``pip install refusion-lit[peft]``).

    Attributes:
        rank: Rank of the update.
        alpha: Scale of the update is alpha / rank.
        dropout: Dropout on the adapters' input, in [0, 1).
        target_modules: Names of the linear layers to adapt; ``all-linear`` takes every one but the head.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """How to make a backbone.

    Attributes:
        source: A local Hugging Face directory or a hub id to load weights from; ``None`` for random weights.
        config: Overrides of the architecture's config; with ``source: null`` it needs ``model_type``.
        random_init: With a source, take only its architecture, not its weights.
        revision: Pinned revision of a hub id.
        attention: Attention pattern; ``None`` takes what the directory's config says, else causal.
        block_size: Tokens a block, with ``attention: block_causal``.
        dtype: Type of the weights.
        attn_implementation: How attention is computed. With ``flex_attention`` the lean body computes the tokens of
            all rows of a batch as one row without padding, compiled on GPUs; on CPUs it is a slow reference.
        lean: Decode without the library's bookkeeping where the architecture is known (Qwen2, Qwen3, Llama with
            ``attn_implementation: sdpa`` or ``flex_attention``, weights neither adapted nor quantised nor sharded):
            equal up to rounding, about twice as fast on small models. Neither training nor checkpoints know of it.
        compile: Compile the lean body's decode steps (up to 128 tokens a row, with a cache) by ``torch.compile`` for a
            few static shapes; on GPUs they become CUDA graphs. Needs ``lean`` and ``attn_implementation: sdpa``. Each
            shape is compiled when it is first met. Made for GPUs with small models and batches, where launching takes
            longer than computing, but measured on a CPU only, where padding costs more than is gained: see Speed in the
            documentation.
        gradient_checkpointing: Trade time for memory in training.
        lora: Train low-rank adapters instead of all weights.
        trust_remote_code: Allow the source to bring Python code that is executed on this machine. Off by default.
    """

    source: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    random_init: bool = False
    revision: str | None = None
    attention: Literal["causal", "bidirectional", "block_causal"] | None = None
    block_size: int | None = None
    dtype: DType = "float32"
    attn_implementation: AttentionImplementation = "sdpa"
    lean: bool = True
    compile: bool = False
    gradient_checkpointing: bool = False
    lora: LoraOptions | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse what could never be built."""
        if self.source is None and "model_type" not in self.config:
            raise ValueError(
                "backbone: expected a source (directory or hub id) or a config with model_type (for example "
                f"'qwen3'), got source=None and config={self.config!r}. Set one of them."
            )
        if self.attention is not None or self.block_size is not None:
            # Refuses one without the other.
            ModelTraits(attention=self.attention or "causal", block_size=self.block_size)
        if self.compile:
            check_compilable(lean=self.lean, attn_implementation=self.attn_implementation)
            if self.lora is not None:
                raise ValueError(
                    "backbone.compile: expected a model without adapters, got lora; set compile: false, or save the "
                    "trained model, which merges them, and decode with that."
                )

    def build(self, tokenizer: PreTrainedTokenizerBase, *, seed: int | None = None) -> Backbone:
        """Make the backbone for a tokenizer.

        The head gets at least as many rows as the tokenizer has ids; new rows are the mean of the old ones.

        Args:
            tokenizer: Its mask token is the model's; see :func:`special_tokens_of`.
            seed: Seeds random weights without touching the global generator's state.

        Raises:
            ValueError: If the source cannot be loaded or is not supported.
        """
        config = self._architecture(tokenizer)
        stored = getattr(config, "refusion_lit", None) or {}
        traits = ModelTraits.from_dict(stored)
        if self.attention is not None:
            traits = ModelTraits(attention=self.attention, block_size=self.block_size, predictions=traits.predictions)
        with _seeded(seed):
            model = self._model(config, tokenizer)
        return Backbone(model, traits, special_tokens_of(tokenizer), lean=self.lean, compile=self.compile)

    def _model(self, config: Any, tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401 - transformers' or peft's
        random_weights = self.source is None or self.random_init
        model = self._random(config) if random_weights else self._pretrained(config)
        if len(tokenizer) > _embedding_weights(model)[0].shape[0]:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
            _mean_initialise(model, config.vocab_size, len(tokenizer))
        mask = special_tokens_of(tokenizer).mask_token_id
        if not random_weights and getattr(tokenizer, _NEW_MASK, False) and mask is not None:
            # The id may be one of the spare rows that many models have: untrained, so it starts like a new row.
            _mean_initialise(model, mask, mask + 1)
        model.config.mask_token_id = mask
        if self.gradient_checkpointing:
            _enable_checkpointing(model)
        return model if self.lora is None else _with_lora(model, self.lora)

    def _architecture(self, tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401 - one class per architecture
        if self.source is None:
            values: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
            values |= self.config
            values.setdefault("eos_token_id", tokenizer.eos_token_id)
            values.setdefault("bos_token_id", None)
            _check_architecture(self.config)
            return AutoConfig.for_model(**values)
        config: Any
        if self.trust_remote_code:
            warn_of_remote_code(self.source)
        try:
            config, unknown = AutoConfig.from_pretrained(
                self.source,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                return_unused_kwargs=True,
                **self.config,
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"backbone.source: expected a Hugging Face directory or hub id, got {self.source!r}, which cannot be "
                f"loaded ({reason_of(error)}). Check the path, or the id and the network."
            ) from error
        for name in unknown:
            raise _unknown_option(name, config)
        return config

    def _random(self, config: Any) -> PreTrainedModel:  # noqa: ANN401
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, self.dtype), attn_implementation=self.attn_implementation
        )

    def _pretrained(self, config: Any) -> PreTrainedModel:  # noqa: ANN401
        assert self.source is not None
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.source,
                config=config,
                revision=self.revision,
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attn_implementation,
                trust_remote_code=self.trust_remote_code,
                weights_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # readers of formats have errors of their own for damaged files
            raise ValueError(
                f"backbone.source: the weights of {self.source!r} cannot be loaded ({reason_of(error)}). They may be "
                "truncated or of another architecture than config.json says; fetch them again."
            ) from error
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:  # transformers would leave them random
            raise ValueError(
                f"backbone.source: expected all weights in {self.source!r}, got none for {missing[0]} and "
                f"{len(missing) - 1} more. Fetch them again, or set random_init: true to train from random weights."
            )
        return model


def _check_architecture(values: Mapping[str, Any]) -> None:
    """Refuse a model type that transformers does not know, and misspelt options, which it would keep and not use.

    Names that are like none of the architecture's stay: some are taken in under other names. So does what transformers
    wrote itself, perhaps another version.

    Raises:
        ValueError: Naming the nearest right word.
    """
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; take one such as 'qwen3' or 'llama'."
        raise ValueError(f"backbone.config.model_type: expected one that transformers knows, got {model_type!r}{hint}")
    if "transformers_version" in values:
        return
    config = CONFIG_MAPPING[model_type]()
    for name in values:
        is_token = name.endswith("_token_id")  # these resemble one another, and ours is new to the architecture
        if not hasattr(config, name) and not is_token and get_close_matches(name, config.to_dict(), n=1, cutoff=0.8):
            raise _unknown_option(name, config)


def _unknown_option(name: str, config: Any) -> ValueError:  # noqa: ANN401 - one class per architecture
    near = get_close_matches(name, config.to_dict(), n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return ValueError(f"backbone.config: {type(config).__name__} has no option {name}{hint}")


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the generator of weights, which are made on the CPU, and restore its state afterwards."""
    with torch.random.fork_rng(devices=(), enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Read a tokenizer's special ids.

    Raises:
        ValueError: If it has neither a padding nor an end-of-sequence token.
    """
    eos: Any = tokenizer.eos_token_id
    mask: Any = tokenizer.mask_token_id
    pad: Any = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
    if pad is None or eos is None:
        raise ValueError(
            "tokenizer: expected an end-of-sequence token, got none. Set eos_token in its tokenizer_config.json."
        )
    return SpecialTokens(
        mask_token_id=mask, eos_token_ids=(int(eos),), pad_token_id=int(pad), vocab_size=len(tokenizer)
    )


def ensure_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token_id: int | None = None) -> None:
    """Give a tokenizer a mask token if it has none.

    Args:
        tokenizer: Changed in place.
        mask_token_id: Id that a model's config names; its token is taken when the tokenizer names none itself.
    """
    if tokenizer.mask_token_id is not None:
        return
    named = tokenizer.convert_ids_to_tokens(mask_token_id) if mask_token_id is not None else None
    tokenizer.add_special_tokens({"mask_token": named or "<|mask|>"})
    if named is None:
        setattr(tokenizer, _NEW_MASK, True)


def save_directory(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    prompt_template: str = "{query}",
) -> None:
    """Write a Hugging Face directory: safetensors, config with ``mask_token_id``, traits and template, tokenizer.

    Adapters are merged into the weights first.

    Raises:
        ValueError: If the directory holds files already (an old ``model.safetensors`` could win when loading).
    """
    path = Path(directory)
    if path.exists() and any(path.iterdir()):
        raise ValueError(
            f"output: expected a new or empty directory, got {path}, which holds files. Choose another one."
        )
    model: Any = backbone.model
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.config.mask_token_id = backbone.special_tokens.mask_token_id
    model.config.refusion_lit = {**backbone.traits.to_dict(), _TEMPLATE: prompt_template}
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def prompt_template_of(backbone: Backbone) -> str:
    """Return how a query becomes a prompt, as the directory that a backbone was loaded from says."""
    return (getattr(backbone.config, "refusion_lit", None) or {}).get(_TEMPLATE, "{query}")


def _mean_initialise(model: PreTrainedModel, start: int, stop: int) -> None:
    """Set embedding and head rows from ``start`` to ``stop`` to the mean of the rows before them."""
    with torch.no_grad():
        for weight in _embedding_weights(model):
            weight[start:stop] = weight[:start].mean(0, keepdim=True)


def _embedding_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the rows of embedding and head; one and the same tensor where they are tied."""
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer.weight for layer in layers]


def _enable_checkpointing(model: PreTrainedModel) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.20 or so on
    if enable is None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        enable()


def _with_lora(model: PreTrainedModel, options: LoraOptions) -> Any:  # noqa: ANN401 - a peft class
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("backbone.lora: needs the peft package; install refusion-lit[peft].") from error
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] - it takes any number
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
    )
    return get_peft_model(model, config)


def architecture_of(backbone: Backbone) -> Mapping[str, Any]:
    """Return the config as JSON values, enough to rebuild the architecture with random weights."""
    return backbone.config.to_dict()


def reason_of(error: Exception) -> str:
    """Return why something could not be read, in one line; torch's advice to load code after all is left out."""
    if isinstance(error, UnpicklingError):
        if "unsupported" in str(error).lower():
            return "it holds more than tensors and plain values, which could run code when it is loaded"
        return "it is not what torch.save writes"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def warn_of_remote_code(source: str) -> None:
    """Say what ``trust_remote_code`` means before anything runs."""
    warnings.warn(
        f"trust_remote_code: Python code that comes with {source} will run on this machine with all your rights.",
        stacklevel=3,
    )
