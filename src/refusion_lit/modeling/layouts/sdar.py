"""SDAR (arXiv 2510.06303): dense Qwen3 with block-causal attention and unshifted masks."""

from __future__ import annotations

from refusion_lit.modeling.layouts.base import Layout

SDAR = Layout(
    name="sdar",
    family="SDAR 1.7B, 4B and 8B (dense)",
    model_type="sdar",
    base="qwen3",
    architecture="SDARForCausalLM",
    auto_map={
        "AutoConfig": "JetLM/SDAR-1.7B-Chat--configuration_sdar.SDARConfig",
        "AutoModel": "JetLM/SDAR-1.7B-Chat--modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "JetLM/SDAR-1.7B-Chat--modeling_sdar.SDARForCausalLM",
    },
    attention="block_causal",
    predictions=("mask",),
    block_size=4,
    block_size_option="block_size",
    mask_tokens=("<|MASK|>",),
    end_tokens=("<|im_end|>",),
    slow_tokenizer="Qwen2Tokenizer",
    decoder="BlockDiffusion",
    decoder_options={"threshold": 0.85, "confidence": "filtered", "fused": False},
)
