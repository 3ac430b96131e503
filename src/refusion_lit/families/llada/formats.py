"""Checkpoint formats of LLaDA, Dream and Open-dLLM.

LLaDA is a Llama with the weight names of OLMo's code. Dream and Open-dLLM are Qwen2 models in which the position before
a mask predicts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refusion_lit.modeling.formats import CheckpointFormat, ExportLayout, ServingProgram, register

_BLOCK = "model.transformer.blocks.{}"
_LAYER = "model.layers.{}"

_UNUSED = {
    "alibi_bias_max": 8.0, "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False,
    "block_group_size": 1, "embedding_dropout": 0.0, "flash_attention": False, "init_cutoff_factor": None,
    "init_device": "meta", "init_fn": "mitchell", "precision": "amp_bf16", "residual_dropout": 0.0,
    "rope_full_precision": True, "use_cache": False,
}  # fmt: skip
"""Options of LLaDA's classes without a counterpart in Llama, and the values that exports write."""


@dataclass(frozen=True, kw_only=True)
class _LLaDAFormat(CheckpointFormat):
    def library_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a config, filling in derived sizes; the embedding may have more rows than ``vocab_size``."""
        options = super().library_options(values)
        options["vocab_size"] = options.pop("embedding_size", None) or options["vocab_size"]
        hidden = options["hidden_size"]
        ratio = options.pop("mlp_ratio", 4)
        options["intermediate_size"] = options.get("intermediate_size") or ratio * hidden
        options["num_key_value_heads"] = options.get("num_key_value_heads") or options["num_attention_heads"]
        return options


register(
    _LLaDAFormat(
        name="llada",
        family="LLaDA 8B Base, Instruct and 1.5",
        model_type="llada",
        base="llama",
        config_names={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_kv_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "mlp_hidden_size",
            "max_position_embeddings": "max_sequence_length",
            "tie_word_embeddings": "weight_tying",
            "initializer_range": "init_std",
        },
        required={
            "activation_type": ("silu",),
            "alibi": (False,),
            "attention_layer_norm": (False,),
            "block_type": ("llama",),
            "include_bias": (False,),
            "include_qkv_bias": (False, None),
            "input_emb_norm": (False,),
            "layer_norm_type": ("rms",),
            "layer_norm_with_affine": (True,),
            "multi_query_attention": (None, False),
            "rope": (True,),
            "scale_logits": (False,),
        },
        dropped=tuple(_UNUSED),
        weight_names=(
            ("model.embed_tokens", "model.transformer.wte"),
            ("model.norm", "model.transformer.ln_f"),
            ("lm_head", "model.transformer.ff_out"),
            (f"{_LAYER}.input_layernorm", f"{_BLOCK}.attn_norm"),
            (f"{_LAYER}.post_attention_layernorm", f"{_BLOCK}.ff_norm"),
            (f"{_LAYER}.self_attn.q_proj", f"{_BLOCK}.q_proj"),
            (f"{_LAYER}.self_attn.k_proj", f"{_BLOCK}.k_proj"),
            (f"{_LAYER}.self_attn.v_proj", f"{_BLOCK}.v_proj"),
            (f"{_LAYER}.self_attn.o_proj", f"{_BLOCK}.attn_out"),
            (f"{_LAYER}.mlp.gate_proj", f"{_BLOCK}.ff_proj"),
            (f"{_LAYER}.mlp.up_proj", f"{_BLOCK}.up_proj"),
            (f"{_LAYER}.mlp.down_proj", f"{_BLOCK}.ff_out"),
        ),
        attention="bidirectional",
        predictions=("mask",),
        mask_tokens=("<|mdm_mask|>",),
        end_tokens=("<|eot_id|>",),
        decoder="LLaDA",
        decoder_options={"block_length": 32},
        layout=ExportLayout(
            repository="GSAI-ML/LLaDA-8B-Instruct",
            classes={
                "AutoConfig": "configuration_llada.LLaDAConfig",
                "AutoModel": "modeling_llada.LLaDAModelLM",
                "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
            },
            architecture="LLaDAModelLM",
            options=("embedding_size", "mask_token_id", "pad_token_id"),
            omitted=("bos_token_id", "hidden_act", "rope_scaling"),
            constants={**_UNUSED, "mlp_ratio": 4, "multi_query_attention": None},
            supported={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
            decoder_names={
                "block_length": "block_length",
                "steps": "steps",
                "order": "remasking",
                "guidance_scale": "cfg_scale",
                "forbid_eos": "logits_eos_inf",
                "eos_confidence_zero": "confidence_eos_eot_inf",
            },
            decoder_values={"order": {name: name for name in ("low_confidence", "random")}},
            engines=(
                ServingProgram(
                    name="dInfer",
                    command="python benchmarks/benchmark.py --model_name {model} --model_type llada "
                    "--block_length 32 --gpu 0",
                    mask_token_id=126336,
                ),
            ),
        ),
    )
)

register(
    CheckpointFormat(
        name="dream",
        family="Dream v0 7B Base and Instruct, Dream-Coder",
        model_type="Dream",
        base="qwen2",
        attention="bidirectional",
        predictions=("mask_shifted",),
        mask_tokens=("<|mask|>",),
        end_tokens=("<|im_end|>",),
        slow_tokenizer="Qwen2Tokenizer",
        decoder="LLaDA",
        decoder_options={"order": "entropy", "confidence": "tempered", "shifted": True},
        layout=ExportLayout(
            repository="Dream-org/Dream-v0-Instruct-7B",
            classes={"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
            architecture="DreamModel",
            options=("mask_token_id", "max_window_layers", "pad_token_id", "torch_dtype"),
            constants={"sliding_window": None, "use_cache": True, "use_sliding_window": False},
            decoder_names={"order": "alg", "steps": "steps"},
            decoder_values={"order": {name: name for name in ("origin", "maskgit_plus", "topk_margin", "entropy")}},
        ),
    )
)

register(
    CheckpointFormat(
        name="open_dllm",
        family="Open-dLLM and Open-dCoder 0.5B",
        model_type=None,
        base="qwen2",
        attention="bidirectional",
        predictions=("mask_shifted",),
        mask_tokens=("<M>", "<|mask|>"),
        decoder="LLaDA",
        decoder_options={"order": "entropy", "confidence": "tempered", "shifted": True},
    )
)
