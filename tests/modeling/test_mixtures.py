"""Mixtures of experts in published formats: weights, logits, routing and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import refusion_lit
from refusion_lit.decoding import BlockDiffusion, Decoder, TokenEditing
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.saving import save_model
from refusion_lit.modeling.weights import published_weights
from refusion_lit.text_model import TextModel
from refusion_lit.types import ModelTraits
from support.published import MODELS, published_model, reference

LAYOUTS = [("llada2", "llada2-tiny"), ("sdar_moe", "sdar-moe-tiny")]


def logits(model: TextModel, tokens: list[int], block_size: int) -> Tensor:
    backbone = model.backbone
    number = torch.arange(len(tokens)) // block_size
    sees = (number[:, None] >= number)[None]
    with torch.no_grad():
        return backbone.logits(backbone.hidden_states(torch.tensor([tokens]), torch.arange(len(tokens))[None], sees))[0]


def copy_model(name: str, path: Path, **config: Any) -> Path:
    shutil.copytree(MODELS[name], path)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, **config}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=r"^backbone\.") as caught:
        refusion_lit.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
@pytest.mark.parametrize("name", ["llada2_logits", "sdar_moe_logits"])
def test_logits_and_experts_are_those_of_the_authors_class(name: str, dtype: str, tolerance: float) -> None:
    golden = reference(name)
    model = published_model(golden["model"], dtype)
    routers = [module for path, module in model.backbone.body.named_modules() if path.endswith("mlp.gate")]
    chosen: list[list[list[int]]] = []

    def record_experts(_router: nn.Module, _inputs: Any, output: Any) -> None:
        chosen.append(output[2].sort(-1).values.tolist())  # the third output are the numbers of a token's experts

    hooks = [router.register_forward_hook(record_experts) for router in routers]
    for case in golden["cases"]:
        chosen.clear()
        actual = logits(model, case["inputs"], case["block_length"]).double()
        torch.testing.assert_close(actual, torch.tensor(case["logits"], dtype=torch.float64), atol=tolerance, rtol=0)
        if "experts" in case:
            assert chosen == case["experts"]
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("layout", "name"), [*LAYOUTS, ("nemotron_labs_diffusion", "nld-tiny"), ("idlm", "idlm-tiny")])
def test_weights_are_split_and_stacked_in_both_directions(layout: str, name: str) -> None:
    stored = load_file(MODELS[name] / "model.safetensors")
    written = published_weights(published_model(name).backbone.model, FORMATS[layout])
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", ["llada2-tiny", "sdar-moe-tiny"])
def test_an_export_is_a_plain_model_of_transformers(name: str, tmp_path: Path) -> None:
    model = published_model(name)
    save_model(model.backbone, model.tokenizer, tmp_path / "export")
    again = refusion_lit.load(tmp_path / "export")
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert "model.layers.1.self_attn.k_proj.weight" in stored
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in stored
    assert type(again.backbone.model).__module__.startswith("transformers.")
    assert (again.backbone.traits, again.default_decoder) == (model.backbone.traits, model.default_decoder)
    assert torch.equal(logits(again, [1, 2, 3, 4], 4), logits(model, [1, 2, 3, 4], 4))


def test_options_that_the_config_lacks_have_the_defaults_of_the_authors_class(tmp_path: Path) -> None:
    path = copy_model("llada2-tiny", tmp_path / "llada2")
    stored = json.loads((path / "config.json").read_text())
    assert stored.pop("routed_scaling_factor") == 2.5  # the default, so that logits are the golden logits
    (path / "config.json").write_text(json.dumps(stored))
    tokens = [1, 2, 3, 4]
    assert torch.equal(logits(refusion_lit.load(path), tokens, 4), logits(published_model("llada2-tiny"), tokens, 4))
    defaults = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 2, "max_position_embeddings": 16384}
    (path / "config.json").write_text(json.dumps({key: stored[key] for key in stored.keys() - defaults.keys()}))
    loaded = refusion_lit.load(path).backbone.config
    assert {name: getattr(loaded, name) for name in defaults} == defaults


BOTH = ("mask", "visible")


@pytest.mark.parametrize(
    ("name", "traits", "mask", "ends", "decoder"),
    [
        (
            "llada2-tiny", ModelTraits(attention="block_causal", block_size=32, predictions=BOTH), 20, (17,),
            BlockDiffusion(block_size=32, num_steps=32, threshold=0.95, confidence="tempered"),
        ),
        (
            "sdar-moe-tiny", ModelTraits(attention="block_causal", block_size=4, predictions=("mask",)), 19, (18, 16),
            BlockDiffusion(block_size=4, threshold=0.85, confidence="tempered", fused=False),
        ),
    ],
)  # fmt: skip
def test_traits_ids_and_decoder_come_from_the_checkpoint(
    name: str, traits: ModelTraits, mask: int, ends: tuple[int, ...], decoder: Decoder
) -> None:
    model = published_model(name)
    special = model.backbone.special_tokens
    assert model.backbone.traits == traits
    assert (special.mask_token_id, special.eos_token_ids) == (mask, ends)
    assert model.default_decoder == decoder


def test_the_name_of_the_checkpoint_tells_2_1_from_2_0(tmp_path: Path) -> None:
    editing = TokenEditing(block_size=32, mask_threshold=0.7, edit_threshold=0.5, confidence="tempered")
    for folder in ("LLaDA2.1-mini", "llada2.1-flash-tuned"):
        assert refusion_lit.load(copy_model("llada2-tiny", tmp_path / folder)).default_decoder == editing
    named = BackboneConfig(source="x", checkpoint_format="llada21")
    assert refusion_lit.load(MODELS["llada2-tiny"], overrides=named).default_decoder == editing
    assert isinstance(
        refusion_lit.load(copy_model("llada2-tiny", tmp_path / "LLaDA2.0-mini")).default_decoder, BlockDiffusion
    )


MIXTURES = [name for _, name in LAYOUTS]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("num_experts", [8, 32])
def test_another_number_of_experts_is_refused_with_both_numbers(name: str, num_experts: int, tmp_path: Path) -> None:
    message = refusal(copy_model(name, tmp_path / "model", num_experts=num_experts))
    assert f"{num_experts} experts" in message
    assert "16" in message


@pytest.mark.parametrize("name", MIXTURES)
def test_an_unknown_type_of_layer_is_refused(name: str, tmp_path: Path) -> None:
    layer_types = ["full_attention", "foo_attention", "full_attention"]
    assert "foo_attention" in refusal(copy_model(name, tmp_path / "model", layer_types=layer_types))


def test_another_score_of_experts_is_refused(tmp_path: Path) -> None:
    assert "score_function" in refusal(copy_model("llada2-tiny", tmp_path / "model", score_function="softmax"))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_missing_expert_is_refused(name: str, tmp_path: Path) -> None:
    path = copy_model(name, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, path / "model.safetensors")
    assert "experts" in refusal(path)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_damaged_weight_of_queries_keys_and_values_is_named(damage: str, tmp_path: Path) -> None:
    path = copy_model("llada2-tiny", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    name = "model.layers.2.attention.query_key_value.weight"
    weight = weights.pop(name)
    if damage == "shape":
        weights[name] = weight[:-32].clone()
    save_file(weights, path / "model.safetensors")
    assert name in refusal(path)


def test_shards_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = copy_model("llada2-tiny", tmp_path / "llada2")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {f"model-0000{i + 1}-of-00004.safetensors": sorted(weights)[i::4] for i in range(4)}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = logits(published_model("llada2-tiny"), [1, 2, 3], 4)
    assert torch.equal(logits(refusion_lit.load(folder), [1, 2, 3], 4), expected)
    (folder / "model-00003-of-00004.safetensors").unlink()
    assert "model-00003-of-00004" in refusal(folder)


@pytest.mark.parametrize("name", ["llada2-tiny", "sdar-moe-tiny"])
def test_a_context_beyond_the_models_is_refused(name: str) -> None:
    model = published_model(name)
    with pytest.raises(ValueError, match=r"512") as caught:
        model.generate(["12+34>"], max_new_tokens=600)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llada2-tiny", "sdar-moe-tiny"])
def test_a_training_step_reaches_all_weights_of_used_experts(name: str) -> None:
    backbone = refusion_lit.load(MODELS[name]).backbone
    ids = torch.randint(0, 16, (2, 24), generator=torch.Generator().manual_seed(0))
    hidden = backbone(ids, torch.arange(24).expand(2, -1))
    backbone.logits(hidden).square().mean().backward()
    missing = [key for key, weight in backbone.named_parameters() if weight.grad is None]
    assert missing == []
    assert isinstance(backbone.head, nn.Linear)
