"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from refusion_lit.utils.require import check_options, require


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Options of low-rank adapters (``pip install peft``).

    Attributes:
        rank: The update's rank (``r`` in peft).
        alpha: The update is scaled by alpha / rank (``lora_alpha`` in peft).
        dropout: Dropout probability on the adapters' input, in [0, 1).
        target_modules: Names of the layers to adapt: linear layers and the embedding, but not the head.
            ``all-linear`` adapts every linear layer but the head.
    """

    ranges = {"rank": 1, "dropout": "[0, 1)"}
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"

    def __post_init__(self) -> None:
        check_options(self, "backbone.lora.")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A model's low-rank adapters, and the base model on which they were trained.

    Attributes:
        options: The adapters' options.
        base: Directory or hub id of the base model; ``None`` if its weights were random.
        revision: Pinned revision of the base.
        config_overrides: Options of the base's config that were overridden.
        new_token_ids: Tokens whose embedding and head rows differ from the base: added rows, and the spare row for a
            new mask token.
    """

    options: LoraOptions
    base: str | None = None
    revision: str | None = None
    config_overrides: dict[str, Any] = field(default_factory=dict)
    new_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adapters:
        """Read an instance from its JSON values.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        return cls(
            options=LoraOptions(**values["options"]),
            base=values["base"],
            revision=values["revision"],
            config_overrides=dict(values["config_overrides"]),
            new_token_ids=tuple(map(int, values["new_token_ids"])),
        )


def add_adapters(model: Any, options: LoraOptions) -> Any:  # noqa: ANN401 - transformers' and peft's classes
    """Wrap a model with adapters. The model's own weights no longer require gradients.

    Args:
        model: A transformers model.
        options: The adapters' options.

    Returns:
        The ``PeftModel``. Until the adapters are trained, its logits equal the model's.

    Raises:
        ValueError: If peft is not installed, or ``target_modules`` names no layer, or names the head.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("backbone.lora: needs the peft package; run pip install peft.") from error
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] - it takes any number
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
    )
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }
    expected = f"all-linear, or some of {', '.join(sorted(linear))}"
    with quiet_peft():
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"backbone.lora.target_modules: expected {expected}, got {options.target_modules!r}; correct the names."
            ) from error
    is_plain = adapted.get_output_embeddings() is head
    got = f"{options.target_modules!r}, which adapts the head"
    require(is_plain, "backbone.lora.target_modules", expected, got, "leave the head out")
    return adapted


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence peft 0.21's warnings that users cannot act on: a deprecation, and tied weights (see :func:`merged`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`")
        yield


def adapts_embedding(model: Any) -> bool:  # noqa: ANN401 - transformers' or peft's class
    """Return whether a model's embedding has unmerged adapters."""
    return hasattr(model.get_input_embeddings(), "base_layer")


def merge_adapters(model: Any) -> Any:  # noqa: ANN401 - transformers' or peft's class
    """Merge a model's adapters into its weights, in place; return a model without adapters unchanged.

    A head tied to an adapted embedding is untied first, because the embedding's adapters do not change the head in
    training.
    """
    if not hasattr(model, "merge_and_unload"):
        return model
    if adapts_embedding(model):
        untie(model.get_base_model())
    with quiet_peft():
        return model.merge_and_unload()


def untie(model: Any) -> None:  # noqa: ANN401 - a transformers model
    """If head and embedding share weights, give the head a copy."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is getattr(embedding, "base_layer", embedding).weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}  # which transformers leaves out when it saves the model
