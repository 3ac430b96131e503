"""Checkpoints of the families of 2026 that are damaged, and inputs and options that do not fit them, are refused.

The refusal is one line, and comes before weights are read where possible.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import decode
from refusion_lit.modeling import weights as loading
from refusion_lit.modeling.vocabulary import get_add_bos
from refusion_lit.types import Prompt, SamplingParams
from support.published import MODELS, PUBLISHED_2026

TARGET, ASSISTANT = MODELS["dflash-target-tiny"], "dflash-assistant-tiny"
NAMES = sorted(path.name for path in (PUBLISHED_2026 / "models").iterdir())
EXPERTS = "num_experts", "n_routed_experts"
"""Options that name the number of experts."""


def text_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the text model, which DiffusionGemma's config has in a group."""
    return values.get("text_config", values)


def read_config(name: str) -> dict[str, Any]:
    """Return the config of a golden model."""
    return json.loads((MODELS[name] / "config.json").read_text())


WITH_EXPERTS = [name for name in NAMES if text_options(read_config(name)).keys() & {*EXPERTS}]


def copy_model(name: str, folder: Path, **options: Any) -> Path:
    """Copy a checkpoint; change options of its config."""
    path = folder / name
    shutil.copytree(MODELS[name], path)
    values = read_config(name)
    text_options(values).update(options)
    (path / "config.json").write_text(json.dumps(values))
    return path


def split(path: Path) -> dict[str, str]:
    """Store a checkpoint's weights in four shards; return the shard of each weight."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    files = {name: f"model-{i % 4}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in {*files.values()}:
        part = {name: weights[name].clone() for name in files if files[name] == file}
        save_file(part, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def inner_matrix(weights: dict[str, torch.Tensor]) -> str:
    """Return the name of a matrix deep inside a model: the longest name in its second layer."""
    return max((name for name in weights if "layers.1." in name and weights[name].ndim == 2), key=len)


def load(path: Path) -> Any:
    """Load a model, or the assistant together with the model for which it drafts."""
    if path.name == ASSISTANT:
        return refusion_lit.load(TARGET, draft=path)
    return refusion_lit.load(path)


def refusal(path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the one line that the command line prints."""
    sources = [f"--ckpt_path={TARGET}", f"--draft={path}"] if path.name == ASSISTANT else [f"--ckpt_path={path}"]
    capfd.readouterr()
    assert main(["generate", *sources, "--prompt=12+34>"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reading weights fail the test."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr(loading.DiffusionGemmaForBlockDiffusion, "from_pretrained", read)


@pytest.mark.parametrize("name", NAMES)
def test_four_shards_load_as_one_file(name: str, tmp_path: Path) -> None:
    path = copy_model(name, tmp_path)
    split(path)
    ours, whole = (load(source).backbone for source in (path, MODELS[name]))
    modules = (ours.drafter, whole.drafter) if name == ASSISTANT else (ours, whole)
    states = [module.state_dict() for module in modules]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(weight, states[1][key]) for key, weight in states[0].items())


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_shard_is_named(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy_model(name, tmp_path)
    split(path)
    (path / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refusal(path, capfd)


@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_a_missing_shard_is_found_before_weights_are_read(name: str, tmp_path: Path, no_weights: None) -> None:
    path = copy_model(name, tmp_path)
    split(path)
    (path / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2\.safetensors"):
        refusion_lit.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = copy_model(name, tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "fetch" in refusal(file.parent, capfd)


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_another_number_of_experts_is_refused(name: str, factor: float, tmp_path: Path, no_weights: None) -> None:
    values = text_options(read_config(name))
    option = next(option for option in EXPERTS if option in values)
    num_experts = int(factor * values[option])
    with pytest.raises(ValueError, match=rf"{num_experts} experts.* got {values[option]}"):
        refusion_lit.load(copy_model(name, tmp_path, **{option: num_experts}))


def rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **options}


# A golden model, changes of its config, and what the message names.
IMPOSSIBLE = [
    ("llada2-tiny", {"num_experts": 0}, "n_routed_experts|n_group"),
    ("llada2-tiny", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ("llada2-tiny", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("llada2-tiny", {"n_group": 0}, "n_group"),
    ("llada2-tiny", {"n_group": 3}, "n_group"),
    ("llada2-tiny", {"n_group": 16}, "n_group"),
    ("llada2-tiny", {"topk_group": 5}, "topk_group"),
    ("llada2-tiny", {"moe_intermediate_size": 0}, "moe_intermediate_size"),
    ("llada2-tiny", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ("llada2-tiny", {"block_size": 0}, "block_size"),
    ("sdar-moe-tiny", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ("sdar-moe-tiny", {"rope_theta": 0}, "rope_theta"),
    ("sdar-tiny", {"block_size": "four"}, "block_size"),
    ("idlm-tiny", {"block_size": -1}, "block_size"),
    ("idlm-tiny", {"mask_token_id": -1}, "mask_token_id"),
    ("nld-tiny", {"block_size": 2.5}, "block_size"),
    ("nld-tiny", {"mask_token_id": 2.5}, "mask_token_id"),
    ("nld-tiny", {"sliding_window": 0}, "sliding_window"),
    ("llada2-tiny", {"num_shared_experts": 0}, "num_shared_experts"),
    ("llada2-tiny", {"first_k_dense_replace": 4}, "first_k_dense_replace"),
    ("llada2-tiny", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("llada2-tiny", {"block_size": 1024}, "block_size"),
    ("llada2-tiny", {"hidden_act": "foo"}, "hidden_act"),
    ("sdar-tiny", {"block_size": 1024}, "block_size"),
    ("sdar-tiny", {"rope_scaling": rope("foo")}, "rope_type"),
    ("sdar-tiny", {"rope_scaling": rope("linear", factor=-2.0)}, "factor"),
    ("sdar-tiny", {"rope_scaling": rope("linear", factor=0.5)}, "factor"),
    ("sdar-tiny", {"rope_scaling": rope("yarn", factor=2.0, partial_rotary_factor=0.5)}, "partial_rotary_factor"),
    ("sdar-moe-tiny", {"rope_scaling": rope("yarn", factor=2.0, partial_rotary_factor=0.5)}, "partial_rotary_factor"),
    ("idlm-tiny", {"rope_parameters": rope("linear", factor="two")}, "factor"),
    ("nld-tiny", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("nld-tiny", {"rope_scaling": rope("linear", factor=2.0)}, "rope_scaling"),
    ("nld-tiny", {"mask_token_id": None}, "mask_token_id"),
    ("nld-tiny", {"block_size": None}, "block_size"),
    ("wedlm-tiny", {"model_type": []}, "model_type"),
    ("wedlm-tiny", {"mask_token_id": -1}, "mask_token_id"),
    ("diffusion-gemma-tiny", {"sliding_window": 0}, "sliding_window"),
    ("diffusion-gemma-tiny", {"max_position_embeddings": 0}, "max_position_embeddings"),
    ("diffusion-gemma-tiny", {"num_key_value_heads": 3}, "num_attention_heads"),
    ("diffusion-gemma-tiny", {"num_hidden_layers": 2}, "backbone.source.* config"),
    ("diffusion-gemma-tiny", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("diffusion-gemma-tiny", {"rope_scaling": rope("linear", factor=2.0)}, "rope_scaling"),
    ("diffusion-gemma-tiny", {"rope_parameters": {"full_attention": rope("default")}}, "rope_parameters"),
    (
        "diffusion-gemma-tiny",
        {
            "rope_parameters": {
                "full_attention": rope("default"),
                "sliding_attention": rope("default", partial_rotary_factor=0.5),
            }
        },
        "partial_rotary_factor",
    ),
    ("sdar-tiny", {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ("llada2-tiny", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    ("diffusion-gemma-tiny", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("idlm-tiny", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ("nld-tiny", {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ("wedlm-tiny", {"vision_config": {"hidden_size": 16}}, "vision_config"),
    ("llada2-tiny", {"vision_config": {"hidden_size": 16}}, "vision_config"),
    ("wedlm-tiny", {"mask_token_id": 18}, "mask_token_id"),
    ("idlm-tiny", {"mask_token_id": 18}, "mask_token_id"),
    ("sdar-tiny", {"mask_token_id": 16}, "mask_token_id"),
    ("dflash-assistant-tiny", {"block_size": 1024}, "block_size"),
    ("dflash-assistant-tiny", {"target_layer_ids": []}, "target_layer_ids"),
    (
        "dflash-assistant-tiny",
        {"rope_parameters": rope("yarn", factor=2.0, partial_rotary_factor=0.5)},
        "partial_rotary_factor",
    ),
]


@pytest.mark.parametrize(
    "quantised", [{"quant_method": "fp8"}, {"quant_method": "awq"}, {"quant_algo": "FP8"}, [4]], ids=str
)
@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_quantised_weights_are_refused_by_their_method(
    name: str, quantised: Any, tmp_path: Path, no_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy_model(name, tmp_path)
    (path / "config.json").write_text(json.dumps({**read_config(name), "quantization_config": quantised}))
    line = refusal(path, capfd)
    assert "quantization_config" in line
    assert str(next(iter(quantised.values())) if isinstance(quantised, dict) else quantised) in line


# Changes of the config of every golden model, and what the message names.
EVERYWHERE = [
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"initializer_range": -1.0}, "initializer_range"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    ({"final_logit_softcapping": "x"}, "final_logit_softcapping"),
    ({"attention_dropout": -1.0}, "attention_dropout"),
    ({"attention_dropout": 1.5}, "attention_dropout"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention"] * 9}, "layer_types"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"max_position_embeddings": "512"}, "max_position_embeddings"),
    ({"head_dim": True}, "head_dim"),
    ({"qk_norm": "yes"}, "qk_norm"),
    ({"qk_norm": []}, "qk_norm"),
    ({"attention_bias": 1.5}, "attention_bias"),
]


@pytest.mark.parametrize(("options", "expected"), EVERYWHERE, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_an_impossible_option_is_refused_in_every_family(
    name: str, options: dict[str, Any], expected: str, tmp_path: Path, no_weights: None,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert expected in refusal(copy_model(name, tmp_path, **options), capfd)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (ASSISTANT, TARGET.name)])
@pytest.mark.parametrize("damage", ["shape", "missing", "extra"])
def test_a_published_checkpoints_weights_are_compared_before_they_are_read(
    name: str, damage: str, tmp_path: Path, no_weights: None
) -> None:
    path = copy_model(name, tmp_path)
    weights = load_file(path / "model.safetensors")
    key = inner_matrix(weights)
    if damage == "shape":
        weights[key] = weights[key][:-1].clone()
    elif damage == "missing":
        del weights[key]
    else:
        key = "other.weight"
        weights[key] = torch.zeros(2)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(key)):
        refusion_lit.load(path)


@pytest.mark.parametrize(("name", "options", "expected"), IMPOSSIBLE, ids=str)
def test_an_option_that_no_model_can_have_is_refused(
    name: str, options: dict[str, Any], expected: str, tmp_path: Path, no_weights: None,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert re.search(expected, refusal(copy_model(name, tmp_path, **options), capfd))


@pytest.mark.parametrize("length", [-3, None, 1024])
def test_a_canvas_of_an_impossible_length_is_refused(length: int | None, tmp_path: Path, no_weights: None) -> None:
    path = copy_model("diffusion-gemma-tiny", tmp_path)
    (path / "config.json").write_text(json.dumps({**read_config(path.name), "canvas_length": length}))
    with pytest.raises(ValueError, match="canvas_length"):
        refusion_lit.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_type_of_layer_is_refused(
    name: str, tmp_path: Path, no_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    num_layers = text_options(read_config(name))["num_hidden_layers"]
    path = copy_model(name, tmp_path, layer_types=["full_attention"] * (num_layers - 1) + ["foo_attention"])
    expected = "layer_type" if name == ASSISTANT else "foo_attention"
    assert expected in refusal(path, capfd)


@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_layers_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Transformers prints a table of missing weights, which must not reach the user."""
    num_layers = text_options(read_config(name))["num_hidden_layers"]
    assert "layer" in refusal(copy_model(name, tmp_path, num_hidden_layers=num_layers + 1), capfd)


@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_more_layers_than_any_model_has_are_refused_by_name(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers' configs list the kind of every layer: a billion of them would take all memory."""
    assert "num_hidden_layers: expected at most" in refusal(copy_model(name, tmp_path, num_hidden_layers=20_000), capfd)


def test_transformers_own_report_is_printed_for_models_that_transformers_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Loading a model here leaves the loggers of transformers as they are."""
    path = copy_model(TARGET.name, tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert "norm" in refusal(path, capfd)
    assert "REPORT" not in caplog.text
    AutoModelForCausalLM.from_pretrained(path)
    assert "REPORT" in caplog.text


@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_weights_for_images_are_refused_or_skipped_with_a_notice(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only DiffusionGemma has a vision tower, which its golden checkpoint stores."""
    if name == "diffusion-gemma-tiny":
        with pytest.warns(UserWarning, match="vision tower"):
            refusion_lit.load(MODELS[name])
        return
    path = copy_model(name, tmp_path)
    weights = load_file(path / "model.safetensors")
    save_file({**weights, "vision_tower.weight": torch.zeros(2)}, path / "model.safetensors", {"format": "pt"})
    assert "vision_tower.weight" in refusal(path, capfd)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {}}'])
@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_a_damaged_index_is_refused_before_weights_are_read(
    name: str, content: str, tmp_path: Path, no_weights: None
) -> None:
    path = copy_model(name, tmp_path)
    split(path)
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"weight_map .*model\.safetensors\.index\.json"):
        refusion_lit.load(path)


@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_a_file_of_weights_outside_the_directory_is_refused(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy_model(name, tmp_path)
    files = split(path)
    outside = tmp_path / "model-2.safetensors"
    (path / "model-2.safetensors").rename(outside)
    files = {key: f"../{file}" if file == outside.name else file for key, file in files.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert "../model-2.safetensors" in refusal(path, capfd)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_another_shape_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy_model(name, tmp_path)
    weights = load_file(path / "model.safetensors")
    key = inner_matrix(weights)
    weights[key] = weights[key][:-1].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert "fit" in refusal(path, capfd) or "shape" in refusal(path, capfd)


@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_a_prompt_beyond_the_context_is_refused(name: str) -> None:
    model = refusion_lit.load(MODELS[name])
    context = model.backbone.max_positions
    assert context is not None
    prompt, sampling = Prompt(token_ids=(3,) * context, id="long"), SamplingParams(max_new_tokens=8)
    reason = rf"prompt long: expected at most {context - 8} tokens.* got {context}"
    with pytest.raises(ValueError, match=reason) as info:
        decode(model.backbone, model.default_decoder, [prompt], sampling)
    assert "\n" not in str(info.value)


def run_refused_command(capfd: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one line of a command that is refused."""
    capfd.readouterr()
    assert main([*args]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
@pytest.mark.parametrize("given", ["max_new_tokens", "prompt"])
def test_texts_beyond_the_context_are_refused_before_weights_are_read(
    name: str, given: str, tmp_path: Path, no_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    context = text_options(read_config(name))["max_position_embeddings"]
    length = context if given == "max_new_tokens" else context - 3  # "12+34>" has 6 tokens, and "1>" has 2
    options = [f"--ckpt_path={MODELS[name]}", f"--max_new_tokens={length}"]
    assert given in run_refused_command(capfd, "generate", *options, "--prompt=12+34>")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1>\n12+34>\n")
    expected = "prompt 1" if given == "prompt" else "max_new_tokens"
    assert expected in run_refused_command(capfd, "generate", *options, f"--prompts={prompts}")
    assert given in run_refused_command(
        capfd, "trace", *options, "--prompt=12+34>", f"--output={tmp_path / 'trace.html'}"
    )
    if given == "max_new_tokens":
        assert "max_new_tokens" in run_refused_command(capfd, "chat", *options)
        answer = f"--max_answer_tokens={length}"
        assert "max_new_tokens" in run_refused_command(capfd, "serve", *options, answer, "--port=0")


@pytest.mark.parametrize("subcommand", ["test", "predict"])
def test_a_test_beyond_the_context_is_refused_before_weights_are_read(
    subcommand: str, tmp_path: Path, no_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    source, task = f"--ckpt_path={MODELS['sdar-tiny']}", ["--data.task=Additions", "--data.task.num_test=2"]
    # 505 tokens and a prompt of more than 7 tokens do not fit into 512.
    options = ["--model.sampling.max_new_tokens=505", f"--trainer.default_root_dir={tmp_path}"]
    assert "context of 512" in run_refused_command(capfd, subcommand, source, *task, *options)


@pytest.mark.parametrize(
    ("model", "decoder", "named_in_error"),
    [
        (MODELS["sdar-tiny"], "ReFusion", "ReFusion"),
        (MODELS["wedlm-tiny"], "LLaDA", "LLaDA"),
        (TARGET, "SelfSpeculative", "drafter"),
        (TARGET, "APD", "verifier"),
    ],
)
def test_a_decoder_that_does_not_fit_is_refused_before_weights_are_read(
    model: Path, decoder: str, named_in_error: str, tmp_path: Path, no_weights: None, capfd: pytest.CaptureFixture[str]
) -> None:
    source, option = f"--ckpt_path={model}", f"--decoder={decoder}"
    assert named_in_error in run_refused_command(capfd, "generate", source, option, "--prompt=12+34>")
    assert named_in_error in run_refused_command(capfd, "serve", source, option, "--port=0")
    task = ["--data.task=Additions", "--data.task.num_test=2", f"--trainer.default_root_dir={tmp_path}"]
    assert named_in_error in run_refused_command(capfd, "test", source, *task, f"--model.decoders={{a: {decoder}}}")


def test_the_check_before_weights_are_read_sees_the_tokenizer_with_all_options(no_weights: None) -> None:
    def check(plan: Any) -> None:
        assert get_add_bos(plan.tokenizer) is False
        assert plan.context(in_text_order=True) == read_config(TARGET.name)["max_position_embeddings"]
        raise ValueError("checked")  # ends the loading before weights are read

    with pytest.raises(ValueError, match="checked"):
        refusion_lit.load(TARGET, add_bos=False, check=check)
