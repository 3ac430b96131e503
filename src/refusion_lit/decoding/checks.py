"""Checks before any work starts: does the model fit the decoder, do the prompts fit the model?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from refusion_lit.decoding.base import Decoder
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.utils.require import require, require_at_least


class ModelMismatchError(ValueError):
    """A decoder was asked to run on a model that was trained for something else."""


def check_model(model: LanguageModel, decoder: Decoder, *, allow_mismatch: bool = False) -> list[str]:
    """Refuse a model that a decoder cannot run on or that was not trained for it.

    Args:
        model: The model.
        decoder: The decoder.
        allow_mismatch: Only warn if the model was trained for something else.

    Returns:
        The reasons, if allowed.

    Raises:
        ModelMismatchError: With the reasons.
    """
    name, needs = type(decoder).__name__, decoder.requirements()
    if needs.mask_token and model.special_tokens.mask_token_id is None:
        raise ModelMismatchError(
            f"{name} needs a mask token, and the model's tokenizer has none; add one and train it."
        )
    reasons = needs.mismatches(model.traits)
    if reasons:
        message = f"{name} does not fit this model: {'; '.join(reasons)}."
        if not allow_mismatch:
            raise ModelMismatchError(f"{message} Set allow_mismatch: true to run it anyway.")
        warnings.warn(message, stacklevel=2)
    return reasons


def check_context(
    model: LanguageModel, lengths: Mapping[str, int], max_new_tokens: int, max_cache_tokens: int | None = None
) -> None:
    """Refuse prompts that leave no room for the response in the model's context or in a bounded cache.

    Args:
        model: The model.
        lengths: Number of tokens of each prompt, by its id.
        max_new_tokens: Room for the response.
        max_cache_tokens: Bound on the cache, which must hold a single prompt and its response; ``None``: none.

    Raises:
        ValueError: Naming the longest prompt.
    """
    if max_cache_tokens is not None:
        require_at_least("max_cache_tokens", max_cache_tokens, 1)
    if not lengths:
        return
    longest, length = max(lengths.items(), key=lambda item: item[1])
    context = model.max_positions
    if context is not None and length + max_new_tokens > context:
        raise ValueError(
            f"prompt {longest}: expected at most {max(context - max_new_tokens, 0)} tokens (a context of {context} "
            f"less max_new_tokens {max_new_tokens}), got {length}; shorten it or lower max_new_tokens."
        )
    if max_cache_tokens is not None:
        needed = length + max_new_tokens
        expected = f"at least {needed} (prompt {longest} of {length} tokens and max_new_tokens)"
        fix = "raise it, shorten the prompt or lower max_new_tokens"
        require(max_cache_tokens >= needed, "max_cache_tokens", expected, max_cache_tokens, fix)
