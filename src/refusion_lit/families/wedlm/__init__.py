"""WeDLM (arXiv 2512.22737): causal attention, masks that predict themselves, a sliding window.

The decoder ``WeDLM``, the objective ``DualStream``, and the published checkpoints, a Qwen2.5 (7B) and a Qwen3 (8B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refusion_lit.modeling.formats import CheckpointFormat, register


@dataclass(frozen=True, kw_only=True)
class _WeDLMFormat(CheckpointFormat):
    def base_type(self, values: Mapping[str, Any]) -> str:
        """Return Qwen3 for a config with normalised queries and keys, else Qwen2."""
        return "qwen3" if values.get("qk_norm", False) else "qwen2"


WEDLM = _WeDLMFormat(
    name="wedlm",
    family="WeDLM 7B and 8B",
    model_type="wedlm",
    base="qwen3",
    attention="causal",
    predictions=("mask", "next_token"),
    mask_tokens=("<|mask|>", "<|MASK|>"),
    decoder="WeDLM",
)

register(WEDLM)
