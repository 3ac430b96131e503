"""Fast-dLLM v2 (arXiv 2509.26328): Qwen2 with block-causal attention and shifted masks."""

from __future__ import annotations

from refusion_lit.modeling.layouts.base import Layout

_CODE = "Efficient-Large-Model/Fast_dLLM_v2_1.5B"

FAST_DLLM_V2 = Layout(
    name="fast_dllm_v2",
    family="Fast_dLLM_v2 1.5B and 7B",
    model_type="Fast_dLLM_Qwen",
    base="qwen2",
    architecture="Fast_dLLM_QwenForCausalLM",
    auto_map={
        "AutoConfig": f"{_CODE}--configuration.Fast_dLLM_QwenConfig",
        "AutoModel": f"{_CODE}--modeling.Fast_dLLM_QwenForCausalLM",
        "AutoModelForCausalLM": f"{_CODE}--modeling.Fast_dLLM_QwenForCausalLM",
    },
    attention="block_causal",
    predictions=("mask_shifted",),
    block_size=32,
    block_size_option="bd_size",
    mask_tokens=("|<MASK>|",),
    decoder="BlockDiffusion",
    decoder_options={"sub_block_size": 8, "shifted": True, "threshold": 1.0},
)
