"""Open-dLLM and Open-dCoder: Qwen2 with bidirectional attention and shifted masks, under Qwen2's own model type."""

from __future__ import annotations

from refusion_lit.modeling.layouts.base import Layout

OPEN_DLLM = Layout(
    name="open_dllm",
    family="Open-dLLM and Open-dCoder 0.5B",
    model_type=None,
    base="qwen2",
    architecture="Qwen2ForCausalLM",
    attention="bidirectional",
    predictions=("mask_shifted",),
    mask_tokens=("<M>", "<|mask|>"),
    decoder="LLaDA",
    decoder_options={"order": "entropy", "shifted": True},
)
