"""A tokenizer's special tokens, and a model's rows of embedding and head for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from refusion_lit.types import SpecialTokens

_NEW_MASK = "mask_token_is_new"


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Read a tokenizer's special ids.

    Raises:
        ValueError: If it has no end-of-sequence token.
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
        mask_token_id: Id that the model's config names; its token becomes the mask token unless the tokenizer names
            one itself.
    """
    if tokenizer.mask_token_id is not None:
        return
    named = tokenizer.convert_ids_to_tokens(mask_token_id) if mask_token_id is not None else None
    tokenizer.add_special_tokens({"mask_token": named or "<|mask|>"})
    if named is None:
        setattr(tokenizer, _NEW_MASK, True)


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, pretrained: bool) -> tuple[int, ...]:
    """Give embedding and head a row for every token; new rows start as the mean of the rows before them.

    Many models have spare rows beyond their tokenizer's vocabulary. A new mask token may get one of them, which is
    untrained, so it starts like an added row.

    Args:
        model: Changed in place; ``mask_token_id`` of its config becomes the tokenizer's.
        tokenizer: The tokenizer, with its mask token.
        pretrained: Whether the weights are trained ones; random spare rows stay as they are.

    Returns:
        Tokens whose rows are new.
    """
    num_rows, num_tokens = _rows(model)[0].shape[0], len(tokenizer)
    new: list[int] = []
    if num_tokens > num_rows:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        _initialise_as_mean(model, num_rows, num_tokens)
        new += range(num_rows, num_tokens)
    mask = special_tokens_of(tokenizer).mask_token_id
    if pretrained and getattr(tokenizer, _NEW_MASK, False) and mask is not None:
        _initialise_as_mean(model, mask, mask + 1)
        new.append(mask)
    model.config.mask_token_id = mask
    return tuple(sorted(set(new)))


def _initialise_as_mean(model: PreTrainedModel, start: int, stop: int) -> None:
    """Set rows ``start`` to ``stop`` of embedding and head to the mean of the rows before them."""
    with torch.no_grad():
        for weight in _rows(model):
            weight[start:stop] = weight[:start].mean(0, keepdim=True)


def _rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the weights of embedding and head; the same tensor twice if they are tied."""
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer.weight for layer in layers]
