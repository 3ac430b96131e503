"""``export --format``: directories that the programs for published checkpoints load."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli import main
from refusion_lit.modeling.formats import FORMATS
from support.attention_masks import order_mask, pattern_order
from support.published import MODELS, reference

GOLDENS = {
    "llada-tiny": "llada",
    "dream-tiny": "dream",
    "fast-dllm-v2-tiny": "fast_dllm_v2",
    "sdar-tiny": "sdar",
    "sdar-moe-tiny": "sdar_moe",
    "wedlm-tiny": "wedlm",
    "wedlm-qwen2-tiny": "wedlm",
    "llada2-tiny": "llada2",
}
NOT_IN_GOLDENS = {"llada2": {"moe_router_enable_expert_bias": True}}
"""Options of published configs (dFactory's llada2_mini/config.json) that the golden models' configs lack."""
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
GLM = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
       "use_qk_norm": True, "num_nextn_predict_layers": 0}  # fmt: skip
TRAINED: dict[str, tuple[dict[str, Any], str]] = {  # for each format a backbone, and a file of configs/objective
    "llada": ({"model_type": "llama"}, "masked"),
    "dream": ({"model_type": "qwen2"}, "dream"),
    "fast_dllm_v2": ({"model_type": "qwen2", "tie_word_embeddings": True}, "block_masked_v2"),
    "sdar": ({"model_type": "qwen3", "head_dim": 8}, "block_masked"),
    "sdar_moe": ({"model_type": "qwen3_moe", "num_experts": 4, **EXPERTS}, "block_masked"),
    "wedlm": ({"model_type": "qwen3", "head_dim": 8}, "dual_stream"),
    "zarya": ({"model_type": "qwen3", "head_dim": 8}, "zarya"),
    "llada2": ({"model_type": "glm4_moe", **EXPERTS, **GLM}, "block_masked"),
}
PROMPTS = ["1+1>", "12+34,5>"]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def read_config(path: Path) -> dict[str, Any]:
    """Return the config in a model's directory without the version of transformers."""
    return {name: value for name, value in read(path / "config.json").items() if name != "transformers_version"}


@pytest.mark.parametrize("name", GOLDENS)
def test_a_published_checkpoint_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """The authors' programs load an export as they load the original: same config, weights and special tokens."""
    output = tmp_path / "exported"
    assert main(["export", f"--ckpt_path={MODELS[name]}", f"--output={output}", f"--format={GOLDENS[name]}"]) == 0
    expected, written = read_config(MODELS[name]), read_config(output)
    layout = FORMATS[GOLDENS[name]].layout
    assert layout is not None
    expected["auto_map"] = {kind: f"{layout.repository}--{path}" for kind, path in expected["auto_map"].items()}
    assert written == expected | NOT_IN_GOLDENS.get(GOLDENS[name], {})
    weights, golden = load_file(output / "model.safetensors"), load_file(MODELS[name] / "model.safetensors")
    assert weights.keys() == golden.keys()
    assert all(torch.equal(weights[key], golden[key].float()) for key in golden)
    theirs, ours = refusion_lit.load(MODELS[name], device="cpu"), refusion_lit.load(output, device="cpu")
    assert ours.default_decoder == theirs.default_decoder
    assert ours.backbone.special_tokens == theirs.backbone.special_tokens
    assert ours.backbone.traits == theirs.backbone.traits
    generation, special = read(output / "generation_config.json"), theirs.backbone.special_tokens
    assert generation["mask_token_id"] == special.mask_token_id
    assert generation["eos_token_id"] == [*special.eos_token_ids]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output)
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (special.mask_token_id, special.eos_token_ids[0])


# The formats of the golden files with logits of the authors' classes.
LOGITS = {
    "llada_logits": "llada", "dream_logits": "dream", "fast_dllm_v2_logits": "fast_dllm_v2", "sdar_logits": "sdar",
    "sdar_moe_logits": "sdar_moe", "llada2_logits": "llada2", "wedlm_logits": "wedlm", "wedlm_qwen2_logits": "wedlm",
}  # fmt: skip


def read_cases(golden: dict[str, Any]) -> list[tuple[list[int], list[int], int | None, list[Any]]]:
    """Return tokens, positions, block size and logits of a golden file's cases."""
    cases = golden.get("cases") or [
        {"inputs": fed, "logits": logits} for fed, logits in zip(golden["inputs"], golden["logits"], strict=True)
    ]
    result = []
    for case in cases:
        fed = case["inputs"] if isinstance(case["inputs"], dict) else {"input_ids": case["inputs"]}
        positions = fed.get("position_ids") or [*range(len(fed["input_ids"]))]
        result.append((fed["input_ids"], positions, case.get("block_length"), case["logits"]))
    return result


def compute_logits(backbone: Any, tokens: list[int], positions: Any = None, traits: Any = None) -> torch.Tensor:
    """Return the logits of a text under the attention pattern of a model's traits, or of given traits."""
    length = len(tokens)
    ids = torch.tensor([positions or [*range(length)]])
    mask = order_mask(pattern_order(traits or backbone.traits, ids), torch.tensor([length]))
    with torch.no_grad():
        return backbone.logits(backbone.hidden_states(torch.tensor([tokens]), ids, mask))[0]


@pytest.mark.parametrize("name", LOGITS)
def test_an_export_has_the_logits_of_the_authors_class(name: str, tmp_path: Path) -> None:
    golden = reference(name)
    source, output = MODELS[golden["model"]], tmp_path / "exported"
    assert main(["export", f"--ckpt_path={source}", f"--output={output}", f"--format={LOGITS[name]}"]) == 0
    backbone = refusion_lit.load(output, dtype="float64", device="cpu").backbone
    for tokens, positions, size, expected in read_cases(golden):
        traits = replace(backbone.traits, block_size=size or backbone.traits.block_size)
        logits = compute_logits(backbone, tokens, positions, traits)
        torch.testing.assert_close(logits, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def list_layer_names(path: Path) -> set[tuple[str, int]]:
    """Return the names of weights without numbers of layers and experts, with the weights' number of dimensions."""
    weights = load_file(path / "model.safetensors")
    return {(re.sub(r"\.\d+\.", ".N.", name), weight.ndim) for name, weight in weights.items()}


@pytest.mark.filterwarnings("ignore:model.decoders")
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_trained_here_decodes_the_same_once_exported(name: str, tmp_path: Path) -> None:
    """Train a model, export it in a published format, and export that again in transformers' format.

    The first export has the config and layers of golden checkpoints of its format, the model's texts and logits, and a
    card with the commands of other engines. The second export gives the same texts, and transformers the same logits.
    """
    config, objective = TRAINED[name]
    (tmp_path / "backbone.yaml").write_text(yaml.safe_dump({"model": {"backbone": {"config": SIZES | config}}}))
    options = [option for option in TINY if "backbone" not in option]
    options += [f"--model.objective={REPOSITORY}/configs/objective/{objective}.yaml", f"--runs_dir={tmp_path}"]
    files = ["--config", QUICKSTART, "--config", str(tmp_path / "backbone.yaml")]
    assert main(["fit", *files, *options, "--run_name=run"]) == 0
    run, output, again = tmp_path / "run" / "version_0", tmp_path / "exported", tmp_path / "again"
    assert main(["export", f"--ckpt_path={run}", f"--output={output}", f"--format={name}"]) == 0
    assert main(["export", f"--ckpt_path={output}", f"--output={again}", "--format=hf"]) == 0
    trained, exported = (refusion_lit.load(path, dtype="float32", device="cpu") for path in (run, output))
    for decoder in (None, exported.default_decoder):
        assert generate_texts(trained, decoder) == generate_texts(exported, decoder)
    assert generate_texts(refusion_lit.load(again, device="cpu"))[0] == generate_texts(exported)[0]
    tokens = trained.encode(PROMPTS[1])
    assert torch.equal(compute_logits(exported.backbone, tokens), compute_logits(trained.backbone, tokens))
    check_config_and_layers(output, name)
    check_special_tokens(output, trained)
    check_card(output, name, trained)
    check_transformers(again, tokens)


def generate_texts(model: Any, decoder: Any = None) -> list[str]:
    return [row.text for row in model.generate(PROMPTS, decoder=decoder, max_new_tokens=16)]


def check_config_and_layers(output: Path, name: str) -> None:
    """Check that an export has the options and layers that the golden checkpoints of its format have."""
    published, config = FORMATS[name], read_config(output)
    assert config["model_type"] == published.model_type
    assert published.layout is not None
    repository, classes = published.layout.repository, published.layout.classes
    assert config.get("auto_map", {}) == {kind: f"{repository}--{path}" for kind, path in classes.items()}
    for golden in (MODELS[golden] for golden, family in GOLDENS.items() if family == name):
        if read_config(golden).get("qk_norm", config.get("qk_norm")) == config.get("qk_norm"):
            ours = {"refusion_lit", published.block_size_option}  # if the block size is not the family's
            expected_config = read_config(golden) | NOT_IN_GOLDENS.get(name, {})
            assert config.keys() - ours == expected_config.keys() - ours
            assert list_layer_names(output) == list_layer_names(golden)


def check_special_tokens(output: Path, trained: Any) -> None:
    generation = read(output / "generation_config.json")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output)
    special = trained.backbone.special_tokens
    assert generation["mask_token_id"] == tokenizer.mask_token_id == special.mask_token_id
    assert generation["eos_token_id"] == [*special.eos_token_ids]
    assert tokenizer.eos_token_id == special.eos_token_ids[0]


def check_card(output: Path, name: str, trained: Any) -> None:
    """Check that the card has the commands of the engines that run the format, and no program of ours."""
    card, published = (output / "README.md").read_text(), FORMATS[name]
    assert published.family in card
    assert published.layout is not None
    for engine in published.layout.engines:
        assert f"With {engine.name}:" in card
        assert engine.command.format(model=output, block_size=trained.backbone.traits.block_size) in card
    assert "custom_generate" not in card


def check_transformers(directory: Path, tokens: list[int]) -> None:
    """Check that transformers computes the same logits from a directory, with causal attention."""
    plain = refusion_lit.load(directory, device="cpu")
    library = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([tokens])
    causal = replace(plain.backbone.traits, attention="causal", block_size=None)
    with torch.no_grad():
        expected = library(ids, attention_mask=torch.ones_like(ids)).logits[0]
    torch.testing.assert_close(compute_logits(plain.backbone, tokens, traits=causal), expected)


def test_the_decoders_settings_are_in_the_generation_config(tmp_path: Path) -> None:
    output, source = tmp_path / "exported", MODELS["sdar-tiny"]
    decoder = ["--decoder=BlockDiffusion", "--decoder.block_size=4", "--decoder.num_steps=4"]
    decoder += ["--decoder.sampling_rule=sequential"]
    assert main(["export", f"--ckpt_path={source}", f"--output={output}", "--format=sdar", *decoder]) == 0
    generation = read(output / "generation_config.json")
    expected = {"block_length": 4, "denoising_steps": 4, "remasking_strategy": "sequential"}
    assert generation | expected == generation
    assert refusion_lit.load(output, device="cpu").default_decoder.sampling_rule == "sequential"  # type: ignore[attr-defined]
    edited = tmp_path / "edited"  # a format that loading tells by the directory's name, which may change
    assert main(["export", f"--ckpt_path={MODELS['llada2-tiny']}", f"--output={edited}", "--format=llada21",
                 "--decoder=TokenEditing", "--decoder.block_size=32"]) == 0  # fmt: skip
    assert type(refusion_lit.load(edited, device="cpu").default_decoder).__name__ == "TokenEditing"


REFUSED = [  # a golden model, a format that does not fit, and what the message says
    ("dream-tiny", "llada", "model_type llama, got"),
    ("llada-tiny", "zarya", "model_type qwen3, got"),
    ("dream-tiny", "fast_dllm_v2", "attention block_causal, got"),
    ("wedlm-tiny", "sdar", "attention block_causal, got"),
    ("wedlm-tiny", "zarya", "predicts mask and next_token_in_slot, got"),
    ("dream-tiny", "nothing", "format: expected"),
    ("dream-tiny", "open_dllm", "format: expected"),
]


@pytest.mark.parametrize(("name", "layout", "words"), REFUSED)
def test_a_model_that_does_not_fit_is_refused(
    name: str, layout: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "exported"
    assert main(["export", f"--ckpt_path={MODELS[name]}", f"--output={output}", f"--format={layout}"]) == 2
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_model_without_the_familys_shift_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "source", tmp_path / "exported"
    assert main(["export", f"--ckpt_path={MODELS['dream-tiny']}", f"--output={source}"]) == 0
    config = read(source / "config.json")
    config["refusion_lit"] |= {"predictions": ["mask"], "decoder": {"class_path": "LLaDA"}}
    (source / "config.json").write_text(json.dumps(config))
    assert main(["export", f"--ckpt_path={source}", f"--output={output}", "--format=dream"]) == 2
    assert "predicts mask_shifted, got" in capsys.readouterr().err
    assert not output.exists()


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        *((name, {"rope_parameters": ROPE}, "rotary positions") for name in GOLDENS),
        *((name, {"head_dim": 32}, "head_dim 24") for name in ("llada-tiny", "dream-tiny", "fast-dllm-v2-tiny")),
        ("llada-tiny", {"attention_bias": True}, "attention_bias"),
        ("llada-tiny", {"mlp_bias": True}, "mlp_bias"),
        ("llada-tiny", {"hidden_act": "gelu"}, "hidden_act"),
        ("wedlm-tiny", {"attention_bias": True}, "o_proj.bias"),
        ("llada2-tiny", {"use_qk_norm": False}, "use_qk_norm"),
    ],
)
def test_a_backbone_that_the_familys_class_lacks_is_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers' classes can have more than the authors' classes compute."""
    source, output = tmp_path / "source", tmp_path / "exported"
    assert main(["export", f"--ckpt_path={MODELS[name]}", f"--output={source}"]) == 0
    config = read(source / "config.json") | change
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # random, as shapes may differ
    model.save_pretrained(source)
    (source / "config.json").write_text(json.dumps(config))
    assert main(["export", f"--ckpt_path={source}", f"--output={output}", f"--format={GOLDENS[name]}"]) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


def test_adapters_and_drafters_have_no_published_format(
    tmp_path: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        f"--ckpt_path={checkpoint}",
        f"--output={tmp_path / 'exported'}",
        "--format=zarya",
        "--adapter_only=true",
    ]
    assert main(["export", *options]) == 2
    assert "adapter_only: expected" in capsys.readouterr().err


def test_a_damaged_entry_of_a_published_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(shutil.copytree(MODELS["sdar-tiny"], tmp_path / "source"))
    for entry in ("text", {"decoder": "LLaDA"}, {"decoder": {"class_path": "BlockDiffusion", "init_args": {"x": 1}}}):
        (source / "config.json").write_text(json.dumps(read(source / "config.json") | {"refusion_lit": entry}))
        assert main(["generate", f"--ckpt_path={source}", "--prompt=1+1>", "--max_new_tokens=4"]) == 2
        assert "refusion_lit" in capsys.readouterr().err
