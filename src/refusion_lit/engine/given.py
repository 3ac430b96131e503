"""Checks of what a prompt asks of its response: given tokens, and a constraint."""

from __future__ import annotations

from refusion_lit.engine.decoder import Decoder
from refusion_lit.types import Constraint, Prompt, SamplingParams, SpecialTokens
from refusion_lit.utils.require import require


def check_given(decoder: Decoder, prompt: Prompt, sampling: SamplingParams, special_tokens: SpecialTokens) -> None:
    """Refuse given tokens that a decoder cannot keep, and spans that it may not fill.

    Raises:
        ValueError: Naming the prompt and the reason.
    """
    name = f"the template of prompt {prompt.id}"
    reason = decoder.refusal(prompt)
    if reason is not None:
        found = f"{type(decoder).__name__} cannot keep {name} in place: {reason}"
        raise ValueError(f"decoder: {found}; use one that can, such as ReFusion or LLaDA, with a model that fits it.")
    early = {*prompt.given[:-1]} & {*special_tokens.eos_token_ids}
    expected = f"an EOS token only at the end of {name}"
    require(not early, "template", expected, "one before it", "end it there, or remove the token")
    expected = f"at least {prompt.num_to_fill}, the number of tokens to fill in in {name}"
    most = sampling.max_new_tokens
    require(prompt.num_to_fill <= most, "max_new_tokens", expected, most, "raise it")


def check_constraint(decoder: Decoder, constraint: Constraint) -> None:
    """Refuse a constraint that needs the tokens on the left of each with a decoder that draws in another order."""
    holds = decoder.is_left_to_right or not constraint.left_to_right
    fix = "use Autoregressive, or SelfSpeculative on a model with a drafter"
    require(holds, "constraint", "a decoder that draws from left to right", decoder, fix)
