"""Checkpoints of LLaDA2.0 (arXiv 2512.15745) and LLaDA2.1 (arXiv 2602.08676): block diffusion, mixtures of experts.

The architecture is Glm4Moe under other names, with queries, keys and values in one tensor. LLaDA2.0 decodes with
:class:`~refusion_lit.decoding.BlockDiffusion`, LLaDA2.1 with :class:`~refusion_lit.decoding.TokenEditing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from refusion_lit.modeling.formats import CheckpointFormat, ExportLayout, ServingProgram, register
from refusion_lit.utils.require import is_number, require, require_at_least

_LAYER = "model.layers.{}"
_FUSED = f"{_LAYER}.attention.query_key_value"


@dataclass(frozen=True, kw_only=True)
class _LLaDA2Format(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Turn off Glm4Moe's layers for multi-token prediction, which this family lacks; check the numbers of experts.

        Missing options get the defaults of the authors' class. A group of experts is ranked by its two best experts.
        """
        values = {**_DEFAULTS, **values}
        _check_layers(values)
        num_experts, num_groups, num_taken = (values.get(name) for name in ("num_experts", "n_group", "topk_group"))
        if isinstance(num_experts, int) and num_groups is not None:
            where, fix = "backbone.source", "fetch config.json again"
            require_at_least(f"{where}: n_group", num_groups, 1)
            fits = num_experts % num_groups == 0 and num_experts >= 2 * num_groups
            expected = f"groups of equal size, of at least two of the {num_experts} experts"
            require(fits, f"{where}: n_group", expected, num_groups, fix)
            fits = isinstance(num_taken, int) and 1 <= num_taken <= num_groups
            expected = f"an integer from 1 to n_group, which is {num_groups}"
            require(fits, f"{where}: topk_group", expected, num_taken, fix)
        return {"num_nextn_predict_layers": 0, "use_qk_norm": True, **super().library_options(values)}


def _check_layers(values: Mapping[str, Any]) -> None:
    """Refuse impossible numbers of shared experts, and of first layers without experts."""
    num_shared, num_dense = values.get("num_shared_experts"), values.get("first_k_dense_replace")
    num_layers = values.get("num_hidden_layers")
    if "num_shared_experts" in values:
        require_at_least("backbone.source: num_shared_experts", num_shared, 1)
    if isinstance(num_layers, int) and num_dense is not None:
        fits = is_number(num_dense, Integral) and 0 <= num_dense <= num_layers
        expected = f"an integer from 0 to num_hidden_layers, which is {num_layers}"
        require(fits, "backbone.source: first_k_dense_replace", expected, num_dense, "fetch config.json again")


_DEFAULTS = {"max_position_embeddings": 16384, "n_group": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
             "topk_group": 4}  # fmt: skip
"""Defaults of the authors' class that differ from Glm4Moe's and that no weight's shape reveals."""

_UNUSED = {"embedding_dropout": 0.0, "output_dropout": 0.0, "sliding_window": 4096, "use_cache": True}
"""Options of the authors' classes without a counterpart in Glm4Moe, and the values that exports write."""

_OPTIONS: dict[str, Any] = {
    "base": "glm4_moe",
    "config_names": {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    },
    "required": {
        "moe_router_enable_expert_bias": (True,),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "num_nextn_predict_layers": (None, 0),
        "router_dtype": ("fp32", None),
        "score_function": ("sigmoid",),
        "use_bias": (False,),
        "use_qk_norm": (True,),
        "use_rmsnorm": (True,),
        "use_sliding_window": (False, None),
        "using_split_qkv_in_self_attention": (None, False),
    },
    "dropped": ("max_window_layers", "rotary_dim", *_UNUSED),
    "weight_names": (
        ("model.embed_tokens", "model.word_embeddings"),
        (f"{_LAYER}.self_attn.q_proj", _FUSED),
        (f"{_LAYER}.self_attn.k_proj", _FUSED),
        (f"{_LAYER}.self_attn.v_proj", _FUSED),
        (f"{_LAYER}.self_attn.o_proj", f"{_LAYER}.attention.dense"),
        (f"{_LAYER}.self_attn.q_norm", f"{_LAYER}.attention.query_layernorm"),
        (f"{_LAYER}.self_attn.k_norm", f"{_LAYER}.attention.key_layernorm"),
        (f"{_LAYER}.mlp.gate.e_score_correction_bias", f"{_LAYER}.mlp.gate.expert_bias"),
    ),
    "attention": "block_causal",
    # LLaDA2.1 was trained to edit tokens, LLaDA2.0 was not, but their configs do not differ.
    "predictions": ("mask", "visible"),
    "block_size": 32,
    "block_size_option": "block_size",
    "mask_tokens": ("<|mask|>",),
}


def _layout(repository: str, algorithm: str) -> ExportLayout:
    return ExportLayout(
        repository=repository,
        classes={
            "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
            "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
            "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
        },
        architecture="LLaDA2MoeModelLM",
        options=(
            "attention_bias", "dtype", "first_k_dense_replace", "head_dim", "max_window_layers",
            "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
            "num_experts_per_tok", "pad_token_id", "partial_rotary_factor", "rotary_dim", "routed_scaling_factor",
            "topk_group",
        ),
        omitted=("bos_token_id",),
        constants={**_UNUSED, "output_router_logits": False},
        supported={"use_qk_norm": (True,), "num_nextn_predict_layers": (0, None)},
        decoder_names={
            "block_size": "block_length",
            "num_steps": "steps",
            "threshold": "threshold",
            "mask_threshold": "threshold",
            "edit_threshold": "editing_threshold",
        },
        has_index=True,
        engines=(
            ServingProgram(
                name="SGLang",
                command="python -m sglang.launch_server --model-path {model} --trust-remote-code "
                f"--dllm-algorithm {algorithm}",
                block_size=32,
                mask_token_id=156895,
            ),
            ServingProgram(
                name="dInfer",
                command="python eval_dinfer_sglang.py --model dInfer_eval --tasks gsm8k_llada_mini "
                "--apply_chat_template "
                "--model_args model_path={model},model_type=llada2,block_length={block_size},use_bd=True",
                mask_token_id=156895,
            ),
        ),
    )  # fmt: skip


register(
    _LLaDA2Format(
        name="llada2",
        family="LLaDA2.0 mini and flash",
        model_type="llada2_moe",
        decoder="BlockDiffusion",
        decoder_options={"num_steps": 32, "threshold": 0.95, "confidence": "tempered"},
        layout=_layout("inclusionAI/LLaDA2.0-mini", "LowConfidence"),
        **_OPTIONS,
    )
)

register(
    _LLaDA2Format(
        name="llada21",
        family="LLaDA2.1 mini and flash",
        model_type="llada2_moe",
        source_pattern=r"llada-?2[._-]?1",
        decoder="TokenEditing",
        decoder_options={"mask_threshold": 0.7, "edit_threshold": 0.5, "confidence": "tempered"},
        layout=_layout("inclusionAI/LLaDA2.1-mini", "JointThreshold"),
        **_OPTIONS,
    )
)
