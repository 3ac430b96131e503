"""Checks before decoding: arguments, the model for the decoder, prompts for model and cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import getfullargspec
from operator import itemgetter
from typing import Any

from refusion_lit.engine.decoder import Decoder
from refusion_lit.engine.kept_cache import KeptCache
from refusion_lit.engine.output import GenerationCallback
from refusion_lit.modeling.interface import LanguageModel, TextLimits
from refusion_lit.types import DecodingOptions, ModelTraits, Prompt, SamplingParams
from refusion_lit.utils.require import require


class ModelMismatchError(ValueError):
    """Error for a decoder that does not fit the model's training."""


def check_arguments(decoder: object, sampling: object, callbacks: object, kept: object) -> None:
    """Refuse arguments of another type, such as a class in place of an instance.

    Raises:
        ValueError: Naming the argument.
    """
    require(isinstance(decoder, Decoder), "decoder", "an instance of a decoder class", decoder, "create one")
    require(isinstance(sampling, SamplingParams), "sampling", "an instance of SamplingParams", sampling, "create one")
    are_callbacks = isinstance(callbacks, Sequence) and all(isinstance(item, GenerationCallback) for item in callbacks)
    require(are_callbacks, "callbacks", "a list of instances of GenerationCallback", callbacks, "put them into a list")
    require(isinstance(kept, KeptCache | None), "kept", "an instance of KeptCache", kept, "create one: KeptCache()")


def read_decoding_options(named: Mapping[str, Any], *functions: Callable[..., Any]) -> DecodingOptions:
    """Build decoding options from names and values.

    Args:
        named: The options.
        functions: Functions that users call with the options; errors suggest their keyword arguments, too.

    Raises:
        TypeError: If an option is unknown. The error names a similar option, or where sampling options go.
        ValueError: If a value is out of range.
    """
    known, sampling_names = ([field.name for field in fields(kind)] for kind in (DecodingOptions, SamplingParams))
    for name in named.keys() - known:
        arguments = dict.fromkeys(
            argument for function in functions for argument in getfullargspec(function).kwonlyargs
        )
        near = get_close_matches(name, [*arguments, *known, *sampling_names], n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join([*arguments, *known])}."
        if name in sampling_names:
            fix = f"pass sampling=SamplingParams({name}=...)."
        raise TypeError(f"unexpected keyword argument {name!r}; {fix}")
    return DecodingOptions(**named)


def check_traits(
    traits: ModelTraits, decoder: Decoder, *, allow_mismatch: bool = False,
    fix: str = "Set allow_mismatch to true to run it anyway.",
) -> list[str]:  # fmt: skip
    """Refuse a decoder for which a model was not trained; the model's weights are not needed.

    Args:
        traits: What the model was trained to do.
        decoder: The decoder.
        allow_mismatch: Only warn if the model was trained for something else.
        fix: Advice, as a sentence, if :meth:`Decoder.mismatch_fix` returns none.

    Returns:
        The reasons why the model does not fit, if mismatches are allowed.

    Raises:
        ModelMismatchError: With the reasons.
    """
    reasons = decoder.requirements().mismatches(traits)
    if reasons:
        message = f"{type(decoder).__name__} does not fit this model: {'; '.join(reasons)}."
        if not allow_mismatch:
            raise ModelMismatchError(f"{message} {decoder.mismatch_fix(traits) or fix}")
        warnings.warn(message, stacklevel=3)
    return reasons


def check_model(
    model: LanguageModel, decoder: Decoder, *, allow_mismatch: bool = False,
    fix: str = "Set allow_mismatch to true to run it anyway.",
) -> list[str]:  # fmt: skip
    """Refuse a model on which a decoder cannot run, or which was not trained for the decoder.

    Args:
        model: The model.
        decoder: The decoder.
        allow_mismatch: See :func:`check_traits`.
        fix: See :func:`check_traits`.

    Returns:
        The reasons why the model does not fit, if mismatches are allowed.

    Raises:
        ModelMismatchError: With the reasons.
        ValueError: If the model lacks a mask token or a drafter that the decoder needs.
    """
    needs = decoder.requirements()
    special = model.special_tokens
    reasons = check_traits(model.traits, decoder, allow_mismatch=allow_mismatch, fix=fix)
    has_masks = special.mask_token_id is not None or not any("mask" in name for name in needs.predictions)
    require(
        has_masks,
        "decoder",
        "a model with a mask token",
        "a model without a mask token",
        "train it with Hybrid or Masked",
    )
    check_drafter(decoder, has_drafter=bool(special.draft_token_ids))
    return reasons


def check_drafter(decoder: Decoder, *, has_drafter: bool) -> None:
    """Refuse a decoder that needs a drafter on a model without a drafter."""
    fix = "load a drafter with --draft, or set slot_size if the model was trained with the objective Hybrid"
    fits = has_drafter or not decoder.requirements().drafter
    require(fits, "decoder", "a model with a drafter", "a model without a drafter", fix)


def check_context(
    model: TextLimits,
    lengths: Sequence[tuple[int, str]],
    max_new_tokens: int,
    decoder: Decoder | None = None,
    option: str = "max_new_tokens",
) -> None:
    """Refuse prompts that leave no room for the response in the model's context.

    Args:
        model: The model, or its limits alone.
        lengths: Pairs of a prompt's number of tokens and its id, which may be empty.
        max_new_tokens: The response's maximum length.
        decoder: The decoder; ``None``: texts are read in one pass, causally.
        option: The option with the maximum length, for messages.

    Raises:
        ValueError: Naming the longest prompt.
    """
    context = model.context(in_text_order=decoder is None or decoder.keeps_text_order)
    if context is None or not lengths:
        return
    expected = f"less than the model's context of {context} tokens"
    require(max_new_tokens < context, option, expected, max_new_tokens, "lower it")
    length, longest = max(lengths, key=itemgetter(0))
    room = context - max_new_tokens
    expected = f"at most {room} tokens (a context of {context} less {option} {max_new_tokens})"
    require(length <= room, f"prompt {longest}".rstrip(), expected, length, f"shorten it or lower {option}")


def check_prompts(
    model: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    max_cache_tokens: int | None = None,
) -> None:
    """Refuse prompts that are empty or too long, and given tokens that cannot be kept in place.

    For the arguments see :func:`~refusion_lit.decoding.decode`.

    Raises:
        ValueError: Naming the prompt and the reason.
    """
    for prompt in prompts:
        require(len(prompt.token_ids) > 0, f"prompt {prompt.id}", "at least one token", "none", "give it some text")
        if model.image_token_ids:
            images = {*prompt.token_ids} & {*model.image_token_ids}
            fix = "leave the image out"
            require(not images, f"prompt {prompt.id}", "text, as images are not read", f"image tokens {images}", fix)
        if prompt.num_given:
            _check_given(model, decoder, prompt, sampling)
        if prompt.constraint is not None and prompt.constraint.left_to_right:
            fix = "use Autoregressive, or SelfSpeculative on a model with a drafter"
            require(decoder.is_left_to_right, "constraint", "a decoder that draws from left to right", decoder, fix)
    lengths = [(len(prompt.token_ids) + prompt.num_uncounted, prompt.id) for prompt in prompts]
    check_context(model, lengths, sampling.max_new_tokens, decoder)
    if max_cache_tokens is not None:
        _check_cache_size(lengths, sampling.max_new_tokens, max_cache_tokens)
    if model.learns_positions or (model.window is not None and not decoder.keeps_text_order):
        _check_canvas(model, decoder, prompts, sampling)


def _check_given(model: LanguageModel, decoder: Decoder, prompt: Prompt, sampling: SamplingParams) -> None:
    """Refuse given tokens that a decoder cannot keep in place, and spans that exceed the length limit."""
    name = f"the template of prompt {prompt.id}"
    reason = decoder.refusal(prompt)
    if reason is not None:
        problem = f"{type(decoder).__name__} cannot keep {name} in place: {reason}"
        raise ValueError(
            f"decoder: {problem}; use a decoder that can, such as ReFusion or LLaDA, with a model that fits it."
        )
    early = {*prompt.given[:-1]} & {*model.special_tokens.eos_token_ids}
    expected = f"an EOS token only at the end of {name}"
    require(
        not early, "template", expected, "an EOS token before the end", "end the template there, or remove the token"
    )
    expected = f"at least {prompt.num_to_fill}, the number of tokens that are missing in {name}"
    most = sampling.max_new_tokens
    require(prompt.num_to_fill <= most, "max_new_tokens", expected, most, "raise it")


def _check_cache_size(lengths: Sequence[tuple[int, str]], max_new_tokens: int, max_cache_tokens: int) -> None:
    """Refuse a bounded cache that is too small for the longest prompt and its response."""
    length, longest = max(lengths, key=itemgetter(0), default=(0, ""))
    needed = length + max_new_tokens
    expected = f"at least {needed} (prompt {longest} of {length} tokens and max_new_tokens)"
    fix = "raise it, shorten the prompt or lower max_new_tokens"
    require(not lengths or max_cache_tokens >= needed, "max_cache_tokens", expected, max_cache_tokens, fix)


def _check_canvas(model: LanguageModel, decoder: Decoder, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
    """Refuse blocks, slots or windows that reach beyond the model's last learnt position."""
    limit = model.context(in_text_order=decoder.keeps_text_order)
    expected = f"whole blocks, slots or windows in {limit} positions, the model's context"
    fix = "shorten the prompt, lower max_new_tokens, or use smaller blocks or slots"
    for prompt in prompts:
        reach = len(prompt.token_ids) + len(decoder.begin(prompt, sampling, model.special_tokens).tokens)
        fits = limit is None or reach <= limit
        require(fits, f"prompt {prompt.id}", expected, f"{reach} with {decoder}", fix)
