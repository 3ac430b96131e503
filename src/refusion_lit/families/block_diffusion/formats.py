"""Checkpoint formats of block-causal models: Fast-dLLM v2 (arXiv 2509.26328) and SDAR (arXiv 2510.06303).

Fast-dLLM v2 is a Qwen2 with shifted masks; SDAR is a Qwen3, dense or with experts, with unshifted masks.
"""

from __future__ import annotations

from refusion_lit.modeling.formats import CheckpointFormat, register

register(
    CheckpointFormat(
        name="fast_dllm_v2",
        family="Fast_dLLM_v2 1.5B and 7B",
        model_type="Fast_dLLM_Qwen",
        base="qwen2",
        attention="block_causal",
        predictions=("mask_shifted",),
        block_size=32,
        block_size_option="bd_size",
        mask_tokens=("|<MASK>|",),
        decoder="BlockDiffusion",
        decoder_options={"sub_block_size": 8, "shifted": True, "threshold": 1.0},
    )
)

register(
    CheckpointFormat(
        name="sdar",
        family="SDAR 1.7B, 4B and 8B (dense)",
        model_type="sdar",
        base="qwen3",
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
)

register(
    CheckpointFormat(
        name="sdar_moe",
        family="SDAR-30B-A3B (mixture of experts)",
        model_type="sdar_moe",
        base="qwen3_moe",
        required={"use_sliding_window": (False, None)},
        dropped=(
            "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "sliding_window", "use_cache",
            "use_deepep",
        ),
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
)  # fmt: skip
