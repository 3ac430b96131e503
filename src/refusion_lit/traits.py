"""What a model was trained to do; :mod:`refusion_lit.types` exports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from refusion_lit.utils.require import require, require_choice

AttentionKind = Literal["causal", "bidirectional", "block_causal"]
Prediction = Literal["mask", "mask_shifted", "isolated_mask", "visible", "next_token_in_slot", "next_token", "verifier"]


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What a model was trained to do; stored with its weights and checked against decoders.

    Attributes:
        attention: ``causal`` (in sequence order), ``bidirectional``, or ``block_causal``
            (bidirectional inside a block of ``block_size`` positions, causal between blocks).
        block_size: Tokens per block; only with ``block_causal``.
        prompt_is_block: With ``block_causal``, the prompt is one block, and blocks are counted from the response on
            (D2F). Otherwise blocks are counted from position 0, prompt included.
        predictions: What its logits mean. ``mask``: a mask predicts its own position;
            ``mask_shifted``: a mask is predicted by the position before it;
            ``isolated_mask``: a mask that sees no other mask predicts its own position;
            ``visible``: a token that is no mask predicts what belongs at its own position;
            ``next_token_in_slot``: a clean token predicts the next one of its slot;
            ``next_token``: a clean token predicts the next one everywhere;
            ``verifier``: forwards with a cache are those of a second model that predicts the next token.
            ``None``: unknown (a directory that does not state it), which fits every decoder.
    """

    attention: AttentionKind = "causal"
    block_size: int | None = None
    predictions: tuple[Prediction, ...] | None = None
    prompt_is_block: bool = False

    def __post_init__(self) -> None:
        """Check the names, and that a block size is given exactly when the attention needs one."""
        require_choice("attention", self.attention, get_args(AttentionKind))
        for prediction in self.predictions or ():
            require_choice("predictions", prediction, get_args(Prediction))
        has_blocks = self.attention == "block_causal"
        expected = "a value if and only if attention is 'block_causal'"
        holds = has_blocks == (self.block_size is not None)
        require(holds, "block_size", expected, self.block_size, f"set both or neither (attention is {self.attention})")
        holds = has_blocks or not self.prompt_is_block
        require(holds, "prompt_is_block", "attention 'block_causal'", self.attention, "leave it out")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values (stored under ``refusion_lit`` in a model's config)."""
        predictions = None if self.predictions is None else list(self.predictions)
        values = {"attention": self.attention, "block_size": self.block_size, "predictions": predictions}
        return values | ({"prompt_is_block": True} if self.prompt_is_block else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelTraits:
        """Read what :meth:`to_dict` wrote; unknown keys are ignored."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if known.get("predictions") is not None:
            known["predictions"] = tuple(known["predictions"])
        return cls(**known)
