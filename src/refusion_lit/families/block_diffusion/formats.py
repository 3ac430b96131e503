"""Checkpoint formats of block-causal models: Fast-dLLM v2 (arXiv 2509.26328) and SDAR (arXiv 2510.06303).

Fast-dLLM v2 is a Qwen2 with shifted masks; SDAR is a Qwen3, dense or with experts, with unshifted masks.
"""

from __future__ import annotations

from dataclasses import replace

from refusion_lit.modeling.formats import CheckpointFormat, ExportLayout, ServingProgram, register

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
        layout=ExportLayout(
            repository="Efficient-Large-Model/Fast_dLLM_v2_7B",
            classes={
                "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
                "AutoModel": "modeling.Fast_dLLM_QwenForCausalLM",
                "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
            },
            architecture="Fast_dLLM_QwenForCausalLM",
            options=("bd_size", "layer_types", "max_window_layers", "torch_dtype"),
            constants={"sliding_window": None, "use_cache": True, "use_sliding_window": False},
            decoder_names={"block_size": "block_size", "sub_block_size": "small_block_size", "threshold": "threshold"},
        ),
    )
)

_SDAR = CheckpointFormat(
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
    decoder_options={"threshold": 0.85, "confidence": "tempered", "fused": False},
)
_SDAR_LAYOUT = ExportLayout(
    repository="JetLM/SDAR-8B-Chat",
    classes={
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    architecture="SDARForCausalLM",
    options=("attention_bias", "block_size", "head_dim", "mask_token_id", "max_window_layers", "torch_dtype"),
    constants={
        "attn_implementation": "flex_attention", "debug": False, "ep_size": 1, "fuse_cross_entropy": True,
        "micro_forward": False, "skip_checkpoint": False, "sliding_window": None, "use_cache": False,
        "use_deepep": False, "use_sliding_window": False,
    },
    decoder_names={
        "block_size": "block_length",
        "num_steps": "denoising_steps",
        "sampling_rule": "remasking_strategy",
        "threshold": "confidence_threshold",
    },
    decoder_values={
        "sampling_rule": {
            "threshold": "low_confidence_dynamic",
            "sequential": "sequential",
            "entropy_bounded": "entropy_bounded",
        }
    },
    engines=(
        ServingProgram(
            name="LMDeploy",
            command="lmdeploy serve api_server {model} --backend pytorch --dllm-block-length {block_size} "
            "--dllm-unmasking-strategy low_confidence_dynamic",
            mask_token_id=151669,
            values={"hidden_act": "silu"},
        ),
        ServingProgram(
            name="SGLang",
            command="python -m sglang.launch_server --model-path {model} --trust-remote-code "
            "--dllm-algorithm LowConfidence",
            block_size=4,
            mask_token_id=151669,
            values={"hidden_act": "silu", "tie_word_embeddings": False},
        ),
    ),
)  # fmt: skip
_SDAR_MOE_LAYOUT = replace(
    _SDAR_LAYOUT,
    repository="JetLM/SDAR-30B-A3B-Chat",
    classes={
        "AutoConfig": "configuration_sdar_moe.SDARMoeConfig",
        "AutoModel": "modeling_sdar_moe.SDARMoeModel",
        "AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM",
    },
    architecture="SDARMoeForCausalLM",
    options=(
        *_SDAR_LAYOUT.options, "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
    ),
    constants={name: value for name, value in _SDAR_LAYOUT.constants.items() if name != "attn_implementation"},
    engines=(
        _SDAR_LAYOUT.engines[0],
        replace(
            _SDAR_LAYOUT.engines[1],
            values={"decoder_sparse_step": 1, "hidden_act": "silu", "mlp_only_layers": []},  # experts in every layer
        ),
    ),
)  # fmt: skip
register(replace(_SDAR, layout=_SDAR_LAYOUT))
register(
    replace(
        _SDAR,
        name="sdar_moe",
        family="SDAR-30B-A3B (mixture of experts)",
        model_type="sdar_moe",
        base="qwen3_moe",
        required={"use_sliding_window": (False, None)},
        dropped=tuple(_SDAR_MOE_LAYOUT.constants),
        layout=_SDAR_MOE_LAYOUT,
    )
)
