"""What the engines' loaders read, as facts about their sources, and what ``export --format`` writes.

Engines need a GPU and are not run. A fact is an option that a loader reads without a default, a value that it expects,
or the names of all weights that it knows: it skips other weights silently or fails.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli import main
from support.published import MODELS

SIZES = """hidden_size intermediate_size num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps
    tie_word_embeddings vocab_size"""
QWEN = """model.embed_tokens model.norm lm_head
    model.layers.N.input_layernorm model.layers.N.post_attention_layernorm
    model.layers.N.self_attn.q_proj model.layers.N.self_attn.k_proj model.layers.N.self_attn.v_proj
    model.layers.N.self_attn.o_proj model.layers.N.self_attn.q_norm model.layers.N.self_attn.k_norm"""
QWEN2 = " ".join(name for name in QWEN.split() if "_norm" not in name.rpartition(".")[2])
QWEN2_BIAS = tuple(f"model.layers.N.self_attn.{name}_proj.bias" for name in "qkv")
DENSE = "model.layers.N.mlp.gate_proj model.layers.N.mlp.up_proj model.layers.N.mlp.down_proj"
EXPERTS = """model.layers.N.mlp.gate model.layers.N.mlp.experts.N.gate_proj model.layers.N.mlp.experts.N.up_proj
    model.layers.N.mlp.experts.N.down_proj"""
LLADA2 = f"""model.word_embeddings model.norm lm_head
    model.layers.N.input_layernorm model.layers.N.post_attention_layernorm
    model.layers.N.attention.query_key_value model.layers.N.attention.dense
    model.layers.N.attention.query_layernorm model.layers.N.attention.key_layernorm
    model.layers.N.mlp.shared_experts.gate_proj model.layers.N.mlp.shared_experts.up_proj
    model.layers.N.mlp.shared_experts.down_proj {DENSE} {EXPERTS}"""
LLADA = """model.transformer.wte model.transformer.ln_f model.transformer.ff_out
    model.transformer.blocks.N.attn_norm model.transformer.blocks.N.ff_norm model.transformer.blocks.N.q_proj
    model.transformer.blocks.N.k_proj model.transformer.blocks.N.v_proj model.transformer.blocks.N.attn_out
    model.transformer.blocks.N.ff_proj model.transformer.blocks.N.up_proj model.transformer.blocks.N.ff_out"""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Facts about an engine's loader.

    Attributes:
        read: Options of the config that it reads without a default.
        values: Options with values that it expects.
        weights: The weights that it knows, without ``.weight``; N is a number.
        others: Weights with other endings.
        generation: Entries of the generation config that decoding needs.
        files: Files that it opens by name.
    """

    read: str
    values: dict[str, Any]
    weights: str
    others: tuple[str, ...] = ()
    generation: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ("config.json", "tokenizer.json", "model.safetensors")


BIAS = ("model.layers.N.mlp.gate.expert_bias",)
LOADERS: dict[tuple[str, str], Loader] = {
    # sgl-project/sglang, python/sglang/srt/models/sdar.py (060c48f) and srt/dllm/config.py (0ad4de4)
    ("SGLang", "sdar"): Loader(
        read=SIZES, values={"architectures": ["SDARForCausalLM"], "tie_word_embeddings": False},
        weights=f"{QWEN} {DENSE}", generation={"eos_token_id": list},
    ),
    # sgl-project/sglang, python/sglang/srt/models/dream.py (131a395): Qwen2's loader, qwen2.py (0005b7e). Dream is in
    # none of the lists of supported models that were seen
    ("SGLang", "dream"): Loader(
        read=f"{SIZES} hidden_act pad_token_id",
        values={"architectures": ["DreamModel"], "hidden_act": "silu"},
        weights=f"{QWEN2} {DENSE}", others=QWEN2_BIAS, generation={"eos_token_id": list},
    ),
    # the same, fast_dllm_v2.py (0a4cddf): the loader takes tied embeddings, and the block size from bd_size
    ("SGLang", "fast_dllm_v2"): Loader(
        read=f"{SIZES} bd_size hidden_act",
        values={"architectures": ["Fast_dLLM_QwenForCausalLM"], "hidden_act": "silu"},
        weights=f"{QWEN2} {DENSE}".replace(" lm_head", ""), others=QWEN2_BIAS, generation={"eos_token_id": list},
    ),
    # sgl-project/sglang, python/sglang/srt/models/sdar_moe.py (0feeae3): every layer has experts
    ("SGLang", "sdar_moe"): Loader(
        read=f"{SIZES} moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok",
        values={"architectures": ["SDARMoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": []},
        weights=f"{QWEN} {EXPERTS}", generation={"eos_token_id": list},
    ),
    # InternLM/lmdeploy (1263d5c), lmdeploy/pytorch/models/sdar.py and configurations/{sdar,default}.py
    ("LMDeploy", "sdar"): Loader(
        read=f"{SIZES} attention_bias bos_token_id eos_token_id sliding_window",
        values={"architectures": ["SDARForCausalLM"], "model_type": "sdar", "use_sliding_window": False},
        weights=f"{QWEN} {DENSE}",
    ),
    # the same, lmdeploy/pytorch/models/sdar_moe.py
    ("LMDeploy", "sdar_moe"): Loader(
        read=f"""{SIZES} attention_bias bos_token_id decoder_sparse_step eos_token_id mlp_only_layers
            moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok sliding_window""",
        values={"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "use_sliding_window": False},
        weights=f"{QWEN} {EXPERTS}",
    ),
    # sgl-project/sglang, python/sglang/srt/models/llada2.py (02ceb3b): a sigmoid router needs the biases of the
    # experts, which exist only if the config says so
    ("SGLang", "llada2"): Loader(
        read=f"""{SIZES} embedding_dropout first_k_dense_replace head_dim max_position_embeddings
            moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_shared_experts use_bias
            use_qkv_bias""",
        values={"architectures": ["LLaDA2MoeModelLM"], "hidden_act": "silu", "moe_router_enable_expert_bias": True,
                "score_function": "sigmoid", "norm_head": False},
        weights=LLADA2, others=BIAS, generation={"eos_token_id": list},
    ),
    # inclusionAI/dInfer (fce4e32), python/dinfer/model/modeling_llada2_moe_sglang.py
    ("dInfer", "llada2"): Loader(
        read=f"""{SIZES} first_k_dense_replace max_position_embeddings moe_intermediate_size norm_topk_prob
            num_experts num_experts_per_tok num_shared_experts rope_scaling rope_theta""",
        values={"hidden_act": "silu", "moe_router_enable_expert_bias": True, "score_function": "sigmoid"},
        weights=LLADA2, others=BIAS, files=("model.safetensors.index.json", "model.safetensors", "tokenizer.json"),
    ),
    # inclusionAI/dInfer (fce4e32), python/dinfer/model/modeling_llada.py
    ("dInfer", "llada"): Loader(
        read="""block_group_size block_type d_model embedding_size flash_attention include_bias include_qkv_bias
            init_device mlp_hidden_size n_heads n_kv_heads n_layers rope vocab_size weight_tying""",
        values={"model_type": "llada", "block_type": "llama", "block_group_size": 1, "include_bias": False},
        weights=LLADA,
    ),
    # Tencent/WeDLM, wedlm/models/wedlm.py, wedlm/engine/model_runner.py and wedlm/utils/loader.py (21622f8): norms of
    # queries and keys if and only if attention_bias is false, which is true by default
    ("WeDLM", "wedlm"): Loader(
        read=f"{SIZES} attention_bias mask_token_id max_position_embeddings torch_dtype",
        values={"hidden_act": "silu", "attention_bias": False},
        weights=f"{QWEN} {DENSE}",
    ),
    # ai-forever/zarya (33e0bb6), model-scratch: config.json, configuration.py, generation_utils.py and modeling.py
    ("Zarya", "zarya"): Loader(
        read=f"{SIZES} eos_token_id mask_token_id pad_token_id",
        values={"architectures": ["Zarya"], "diffusion_attn_mode": "causal", "sequential_attn_mode": "causal",
                "diffusion_shuffle": True, "sequential_shuffle": True},
        weights=" ".join(f"backbone.{name}" for name in f"{QWEN} {DENSE}".split()),
        generation={"slotted_generation": bool, "slot_size": int, "serial_num_blocks": int, "slot_threshold": float,
                    "token_threshold": float},
    ),
}  # fmt: skip
GOLDENS = {"sdar": "sdar-tiny", "sdar_moe": "sdar-moe-tiny", "llada2": "llada2-tiny", "llada": "llada-tiny",
           "wedlm": "wedlm-tiny", "dream": "dream-tiny", "fast_dllm_v2": "fast-dllm-v2-tiny"}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models to export; of Zarya, no model of the authors' class is stored, so one is trained."""
    path = tmp_path_factory.mktemp("trained")
    (path / "backbone.yaml").write_text(
        "model: {backbone: {config: {model_type: qwen3, head_dim: 8, hidden_size: 32, intermediate_size: 48, "
        "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}}}"
    )
    options = [option for option in TINY if "backbone" not in option]
    options += [f"--model.objective={REPOSITORY}/configs/objective/zarya.yaml", f"--runs_dir={path}", "--run_name=run"]
    assert main(["fit", "--config", QUICKSTART, "--config", str(path / "backbone.yaml"), *options]) == 0
    return {name: MODELS[golden] for name, golden in GOLDENS.items()} | {"zarya": path / "run" / "version_0"}


@pytest.mark.filterwarnings("ignore:model.decoders")
@pytest.mark.parametrize(("engine", "name"), LOADERS)
def test_an_export_has_what_an_engine_reads(engine: str, name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    facts, output = LOADERS[engine, name], tmp_path / "exported"
    assert main(["export", f"--ckpt_path={sources[name]}", f"--output={output}", f"--format={name}"]) == 0
    config, generation = (json.loads((output / f"{file}.json").read_text()) for file in ("config", "generation_config"))
    assert not {*facts.read.split()} - config.keys()
    assert config | facts.values == config
    assert {option: type(generation[option]) for option in facts.generation} == facts.generation
    assert all((output / file).is_file() for file in facts.files)
    with safe_open(output / "model.safetensors", "pt") as file:
        weights = [*file.keys()]
    expected = {*(f"{weight}.weight" for weight in facts.weights.split()), *facts.others}
    assert {re.sub(r"\.\d+\.", ".N.", weight) for weight in weights} == expected
    if "model.safetensors.index.json" in facts.files:
        index = json.loads((output / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
    assert refusion_lit.load(output, device="cpu").default_decoder


def test_the_card_says_which_engine_does_not_serve_a_model(tmp_path: Path) -> None:
    """SGLang looks for a head beside tied embeddings (sdar.py), and for experts in every layer (sdar_moe.py)."""
    cards = {}
    for is_tied in (False, True):
        source, output = tmp_path / f"source-{is_tied}", tmp_path / f"exported-{is_tied}"
        assert main(["export", f"--ckpt_path={MODELS['sdar-tiny']}", f"--output={source}"]) == 0
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
        if is_tied:  # a stored head would stay a head of its own
            weights = load_file(source / "model.safetensors")
            del weights["lm_head.weight"]
            save_file(weights, source / "model.safetensors", {"format": "pt"})
        assert main(["export", f"--ckpt_path={source}", f"--output={output}", "--format=sdar"]) == 0
        cards[is_tied] = (output / "README.md").read_text()
    assert "tie_word_embeddings" in cards[True].partition("With SGLang")[2]
    assert "tie_word_embeddings" not in cards[True].partition("With SGLang")[0].partition("With LMDeploy")[2]
    assert "tie_word_embeddings" not in cards[False]
