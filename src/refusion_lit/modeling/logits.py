"""Scales and softcaps that some architectures apply to the LM head's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SOFTCAPPED = ("beam", "diffusion_gemma_text", "gemma2", "gemma3_text", "gemma4_text", "nanochat", "vaultgemma")
"""Architectures that softcap their logits by ``final_logit_softcapping``."""

_MULTIPLIED = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "hyperclovax": "logits_scaling",
}
"""Option that multiplies the logits, by architecture."""

_DIVIDED = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "minicpm3")
"""Architectures that divide their logits by ``logits_scaling``."""

_OPTIONS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier_scale",
    "lm_head_multiplier",
)


@dataclass(frozen=True, slots=True)
class LogitsChange:
    """An architecture's change to the LM head's logits.

    Attributes:
        factor: Multiplies the logits.
        softcap: Limits the logits to ±``softcap`` by a hyperbolic tangent, in float32 or higher precision; ``None``: no
            limit.

    >>> [round(logit, 3) for logit in LogitsChange(softcap=30.0)(torch.tensor([0.0, 30.0, 3000.0])).tolist()]
    [0.0, 22.848, 30.0]
    """

    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def read(cls, model: Any) -> LogitsChange | None:  # noqa: ANN401 - a transformers model, or peft's wrapper
        """Return the change to logits by a model's config; ``None`` without a change.

        Raises:
            ValueError: If the config changes the logits in a way that is not known for the architecture.
        """
        config = model.config.get_text_config()
        kind, name = config.model_type, type(model).__name__
        values = {option: getattr(config, option, None) for option in _OPTIONS}
        active = {option: value for option, value in values.items() if value not in (None, 1, 1.0)}
        factor, softcap = 1.0, None
        if kind in _SOFTCAPPED:
            softcap = active.pop("final_logit_softcapping", None)
        if kind in _MULTIPLIED:
            factor = active.pop(_MULTIPLIED[kind], 1.0)
        if kind in _DIVIDED:
            factor = 1.0 / active.pop("logits_scaling", 1.0)
        for option, value in active.items():
            raise ValueError(
                f"backbone: expected {name} to take its logits from the head, or to change them in a known way, got "
                f"{option}={value!r}; use a model with a plain head."
            )
        return None if (factor, softcap) == (1.0, None) else cls(factor, softcap)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the changed logits."""
        logits = logits if self.factor == 1.0 else logits * self.factor
        if self.softcap is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, slots=True, eq=False)
class ChangedHead:
    """An LM head with its architecture's scale or softcap.

    Attributes:
        linear: Maps hidden states to the head's logits.
        change: Scales or softcaps the head's logits.
        weight: The head's weights.
    """

    linear: Callable[[Tensor], Tensor]
    change: LogitsChange
    weight: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the scaled or softcapped logits."""
        return self.change(self.linear(hidden))
