"""Building and loading backbones: weights, special tokens, data types, mask tokens that are added, and exports."""

from __future__ import annotations

import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import refusion_lit
from refusion_lit.cli import chat, generate, serve, trace
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import DrafterOptions
from refusion_lit.modeling.load import BackboneConfig, decoding_dtype, default_device
from refusion_lit.modeling.lora import LoraOptions
from refusion_lit.modeling.saving import save_model
from refusion_lit.modeling.source import ModelSource
from refusion_lit.modeling.vocabulary import ensure_mask_token, read_special_tokens
from refusion_lit.types import ModelTraits
from support.forks import fork
from support.tiny import TINY_QWEN, make_base

# A golden model of an earlier release: its config has no group of this package, and its head has more rows than tokens.
MID = Path(__file__).parents[1] / "goldens" / "models" / "additions-mid"
ARCHITECTURE = {**TINY_QWEN, "num_hidden_layers": 2, "tie_word_embeddings": False}


def make_tokenizer(num_words: int = 9, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters after its special tokens."""
    words = [*special.values(), *[chr(ord("a") + i) for i in range(num_words)]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def masked_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 12 tokens: padding, EOS, mask and nine letters."""
    return make_tokenizer(pad_token="<pad>", eos_token="<eos>", mask_token="<mask>")


def maskless_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 11 tokens: padding, EOS and nine letters."""
    return make_tokenizer(pad_token="<pad>", eos_token="<eos>")


def copy_weights(backbone: Backbone) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in backbone.model.state_dict().items()}


def compute_logits(backbone: Backbone, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return backbone.logits(backbone(ids, torch.arange(ids.shape[1]).expand_as(ids)))


IDS = torch.tensor([[3, 5, 2, 4, 7, 6, 3], [8, 8, 1, 2, 2, 9, 4]])


def test_random_weights_are_a_function_of_the_seed_alone() -> None:
    config = BackboneConfig(config=ARCHITECTURE)
    torch.manual_seed(0)
    first = copy_weights(config.build(masked_tokenizer(), seed=3))
    state = torch.get_rng_state()
    torch.manual_seed(99)
    second = copy_weights(config.build(masked_tokenizer(), seed=3))
    other = copy_weights(config.build(masked_tokenizer(), seed=4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is as it was"


def test_without_a_seed_the_global_generator_is_used() -> None:
    config = BackboneConfig(config=ARCHITECTURE)
    torch.manual_seed(0)
    first = copy_weights(config.build(masked_tokenizer()))
    torch.manual_seed(0)
    second = copy_weights(config.build(masked_tokenizer()))
    third = copy_weights(config.build(masked_tokenizer()))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], third["model.embed_tokens.weight"])


def test_a_config_takes_ids_and_size_from_the_tokenizer() -> None:
    backbone = BackboneConfig(config=ARCHITECTURE).build(masked_tokenizer())
    config = backbone.config
    assert config.vocab_size == len(masked_tokenizer()) == 12
    assert (config.pad_token_id, config.eos_token_id, config.mask_token_id) == (0, 1, 2)
    assert backbone.special_tokens.banned_token_ids == (0, 2)  # padding and mask
    wide = BackboneConfig(config={**ARCHITECTURE, "vocab_size": 64}).build(masked_tokenizer())
    assert wide.head.weight.shape[0] == 64
    assert wide.special_tokens.vocab_size == 12
    assert backbone.traits == ModelTraits()


def test_a_config_of_several_models_takes_the_vocabulary_from_the_tokenizer() -> None:
    published = json.loads((MID.parents[1] / "published_2026/models/diffusion-gemma-tiny/config.json").read_text())
    for name in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id"):
        published["text_config"].pop(name, None)
    backbone = BackboneConfig(config=published).build(masked_tokenizer())
    text = backbone.config.get_text_config()
    assert text.vocab_size == len(masked_tokenizer()) == backbone.head.weight.shape[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [None, str(MID)])
def test_weights_have_the_type_asked_for(dtype: Any, source: str | None) -> None:
    options = {"source": source, "config": {} if source else ARCHITECTURE}
    tokenizer = AutoTokenizer.from_pretrained(MID) if source else masked_tokenizer()
    backbone = BackboneConfig(dtype=dtype, **options).build(tokenizer)
    assert {parameter.dtype for parameter in backbone.parameters()} == {getattr(torch, dtype)}
    assert backbone.head.weight.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_attention_is_computed_as_asked_for(implementation: Any) -> None:
    for options in ({"config": ARCHITECTURE}, {"source": str(MID)}):
        config = BackboneConfig(attn_implementation=implementation, **options)
        backbone = config.build(AutoTokenizer.from_pretrained(MID) if config.source else masked_tokenizer())
        assert backbone.config._attn_implementation == implementation


@pytest.mark.parametrize("fused_body", [True, False])
def test_decoding_is_fused_unless_told_otherwise_and_no_directory_says_so(fused_body: bool, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MID)
    backbone = BackboneConfig(source=str(MID), fused_body=fused_body).build(tokenizer)
    assert backbone.fused_body is fused_body
    assert (backbone.make_fused_body() is not None) is fused_body
    save_model(backbone, tokenizer, tmp_path / "saved")
    assert "fused_body" not in (tmp_path / "saved" / "config.json").read_text()
    assert BackboneConfig(source=str(tmp_path / "saved")).build(tokenizer).fused_body


def test_a_released_directory_needs_no_code_of_its_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MID)
    backbone = BackboneConfig(source=str(MID)).build(tokenizer).eval()
    stored = json.loads((MID / "config.json").read_text())
    assert "refusion_lit" not in stored
    assert backbone.special_tokens.mask_token_id == stored["mask_token_id"] == 2
    assert backbone.special_tokens.vocab_size == len(tokenizer) == 19 < backbone.head.weight.shape[0] == 32
    assert backbone.traits == ModelTraits(attention="causal", predictions=None)
    library = AutoModelForCausalLM.from_pretrained(MID).eval()
    with torch.no_grad():
        expected = library(input_ids=IDS).logits
    torch.testing.assert_close(compute_logits(backbone, IDS), expected)


def test_the_model_has_the_mask_id_of_its_tokenizer() -> None:
    for position in range(3):
        names = [("pad_token", "<p>"), ("eos_token", "<e>")]
        names.insert(position, ("mask_token", "<m>"))
        backbone = BackboneConfig(config=ARCHITECTURE).build(make_tokenizer(**dict(names)))
        assert backbone.special_tokens.mask_token_id == backbone.config.mask_token_id == position
    none = BackboneConfig(config=ARCHITECTURE).build(maskless_tokenizer())
    assert none.special_tokens.mask_token_id is None
    assert none.config.mask_token_id is None


@pytest.fixture
def maskless_directory(tmp_path: Path) -> Path:
    """Return a model whose tokenizer has no mask token and whose head has no spare row."""
    return store(tmp_path / "maskless", {})


def store(path: Path, options: dict[str, Any]) -> Path:
    """Write a model with ``maskless_tokenizer`` and options of the architecture; return its directory."""
    backbone = BackboneConfig(config={**ARCHITECTURE, **options}).build(maskless_tokenizer(), seed=1)
    backbone.model.save_pretrained(path)
    maskless_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_an_added_mask_token_starts_as_the_mean(tmp_path: Path, tied: bool) -> None:
    path = store(tmp_path / "model", {"tie_word_embeddings": tied})
    old = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ensure_mask_token(tokenizer)
    assert tokenizer.mask_token_id == 11
    backbone = BackboneConfig(source=str(path)).build(tokenizer)
    embeddings, head = backbone.model.get_input_embeddings().weight, backbone.head.weight
    assert embeddings.shape[0] == head.shape[0] == backbone.config.vocab_size == 12
    for new, before in ((embeddings, old.get_input_embeddings().weight), (head, old.get_output_embeddings().weight)):
        torch.testing.assert_close(new[:11], before)
        torch.testing.assert_close(new[11], before.mean(0))
    assert (embeddings is head) == tied


def test_every_added_row_starts_as_the_mean(tmp_path: Path) -> None:
    path = store(tmp_path / "model", {})
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["x1", "x2"])
    with pytest.warns(UserWarning, match="tokenizer: expected at most 11 tokens, .*'x1', 'x2'"):
        backbone = BackboneConfig(source=str(path)).build(tokenizer, seed=4)
    for weight in (backbone.model.get_input_embeddings().weight, backbone.head.weight):
        assert len(weight) == 13
        torch.testing.assert_close(weight[11:], weight[:11].mean(0).expand(2, -1))


def test_a_new_mask_token_in_a_spare_row_starts_as_the_mean_too(tmp_path: Path) -> None:
    path = store(tmp_path / "model", {"vocab_size": 20})
    old = AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(path)
    ensure_mask_token(tokenizer)
    backbone = BackboneConfig(source=str(path)).build(tokenizer)
    new = backbone.model.get_input_embeddings().weight
    assert len(new) == 20
    torch.testing.assert_close(new[11], old[:11].mean(0))
    torch.testing.assert_close(new[[*range(11), *range(12, 20)]], old[[*range(11), *range(12, 20)]])
    assert backbone.special_tokens.vocab_size == 12


def test_a_mask_token_that_is_known_keeps_its_weights() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MID)
    ensure_mask_token(tokenizer, 2)
    weights = BackboneConfig(source=str(MID)).build(tokenizer).model.get_input_embeddings().weight
    assert torch.equal(weights, AutoModelForCausalLM.from_pretrained(MID).get_input_embeddings().weight)


def test_a_mask_token_is_found_named_or_added() -> None:
    found = masked_tokenizer()
    ensure_mask_token(found, 5)
    assert found.mask_token == "<mask>"
    named = maskless_tokenizer()
    ensure_mask_token(named, 4)
    assert (named.mask_token, named.mask_token_id, len(named)) == ("c", 4, 11)  # "<pad>", "<eos>", "a", "b", "c"
    added = maskless_tokenizer()
    ensure_mask_token(added)
    assert (added.mask_token_id, len(added)) == (11, 12)


def test_special_tokens_of_a_tokenizer() -> None:
    special = read_special_tokens(make_tokenizer(eos_token="<eos>"))
    assert (special.pad_token_id, special.eos_token_ids, special.mask_token_id) == (0, (0,), None)
    assert special.banned_token_ids == ()
    with pytest.raises(ValueError, match=r"^tokenizer: expected an end-of-sequence token"):
        read_special_tokens(make_tokenizer(pad_token="<pad>"))


def test_traits_come_from_the_option_then_the_directory(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MID)
    asked = BackboneConfig(source=str(MID), attention="block_causal", block_size=4).build(tokenizer)
    assert asked.traits == ModelTraits(attention="block_causal", block_size=4)
    asked.traits = replace(asked.traits, predictions=("mask", "next_token"))
    save_model(asked, tokenizer, tmp_path / "blocks")
    source = str(tmp_path / "blocks")
    assert BackboneConfig(source=source).build(tokenizer).traits == asked.traits
    causal = BackboneConfig(source=source, attention="causal").build(tokenizer).traits
    assert causal == ModelTraits(predictions=("mask", "next_token"))


def test_naming_the_attention_that_a_directory_states_changes_nothing(tmp_path: Path) -> None:
    tokenizer = masked_tokenizer()
    traits = ModelTraits(attention="block_causal", block_size=4, predictions=("mask",), prompt_is_block=True)
    backbone = BackboneConfig(config=ARCHITECTURE).build(tokenizer, seed=0)
    backbone.traits = traits
    save_model(backbone, tokenizer, tmp_path / "model")
    named = BackboneConfig(source=str(tmp_path / "model"), attention="block_causal", block_size=4)
    assert named.build(tokenizer).traits == traits
    other = replace(named, attention="bidirectional", block_size=None).build(tokenizer).traits
    assert (other.attention, other.prompt_is_block) == ("bidirectional", False)


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_directory_loads_everywhere(tmp_path: Path, tied: bool) -> None:
    tokenizer = masked_tokenizer()
    config = BackboneConfig(config={**ARCHITECTURE, "tie_word_embeddings": tied})
    backbone = config.build(tokenizer, seed=2).eval()
    backbone.traits = ModelTraits(predictions=("mask", "next_token_in_slot"))
    path = tmp_path / "new" / "model"
    save_model(backbone, tokenizer, path)
    library = AutoModelForCausalLM.from_pretrained(path).eval()
    assert type(library).__name__ == "Qwen3ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(library(input_ids=IDS).logits, compute_logits(backbone, IDS))
    loaded = AutoTokenizer.from_pretrained(path)
    assert (loaded.mask_token_id, loaded.pad_token_id, loaded.eos_token_id) == (2, 0, 1)
    assert loaded("a b c").input_ids == tokenizer("a b c").input_ids == [3, 4, 5]
    values = json.loads((path / "config.json").read_text())
    assert values["mask_token_id"] == 2
    assert values["refusion_lit"]["predictions"] == ["mask", "next_token_in_slot"]
    with safe_open(path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118 - no mapping
    again = BackboneConfig(source=str(path)).build(loaded).eval()
    assert again.traits == backbone.traits
    assert (again.head.weight is again.model.get_input_embeddings().weight) == tied
    torch.testing.assert_close(compute_logits(again, IDS), compute_logits(backbone, IDS))


def test_an_added_mask_token_survives_an_export(tmp_path: Path, maskless_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(maskless_directory)
    ensure_mask_token(tokenizer)
    backbone = BackboneConfig(source=str(maskless_directory)).build(tokenizer)
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight[11] = 7.0  # trained
    save_model(backbone, tokenizer, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    ensure_mask_token(loaded, json.loads((tmp_path / "out" / "config.json").read_text())["mask_token_id"])
    again = BackboneConfig(source=str(tmp_path / "out")).build(loaded)
    assert again.special_tokens.mask_token_id == 11
    assert (again.model.get_input_embeddings().weight[11] == 7.0).all()


def test_a_used_directory_is_not_written_to(tmp_path: Path) -> None:
    tokenizer = masked_tokenizer()
    backbone = BackboneConfig(config=ARCHITECTURE).build(tokenizer)
    (tmp_path / "model.safetensors").write_bytes(b"old")
    with pytest.raises(ValueError, match=r"^output: expected a new or empty directory"):
        save_model(backbone, tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "empty").mkdir()
    save_model(backbone, tokenizer, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_the_architecture_can_be_rebuilt_from_plain_values() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MID)
    backbone = BackboneConfig(source=str(MID)).build(tokenizer)
    values = json.loads(json.dumps(backbone.config.to_dict(), default=str))
    values.pop("dtype", None)
    again = BackboneConfig(config=values).build(tokenizer)
    again.model.load_state_dict(backbone.model.state_dict())
    torch.testing.assert_close(compute_logits(again, IDS), compute_logits(backbone, IDS))


def gradients(config: BackboneConfig) -> dict[str, Tensor]:
    backbone = config.build(masked_tokenizer(), seed=5).train()
    positions = torch.tensor([[0, 1, 5, 6, 2, 3, 4]]).expand_as(IDS)
    backbone.logits(backbone(IDS, positions)).square().mean().backward()
    return {name: value.grad for name, value in backbone.model.named_parameters() if value.grad is not None}


def test_checkpointing_gives_the_same_gradients() -> None:
    config = BackboneConfig(config={**ARCHITECTURE, "initializer_range": 0.5}, dtype="float64")
    checkpointed = replace(config, gradient_checkpointing=True)
    modules = checkpointed.build(masked_tokenizer()).modules()
    assert any(getattr(module, "gradient_checkpointing", False) for module in modules)
    plain, saved = gradients(config), gradients(checkpointed)
    assert plain.keys() == saved.keys()
    assert len(plain) > 10
    for name, value in plain.items():
        torch.testing.assert_close(saved[name], value)


LORA = LoraOptions(rank=2, alpha=8.0)


@pytest.mark.parametrize("lora", [LORA, LoraOptions(rank=3, target_modules=["q_proj", "down_proj"])])
def test_adapters_train_alone_and_merge(tmp_path: Path, lora: LoraOptions) -> None:
    tokenizer = masked_tokenizer()
    config = BackboneConfig(config={**ARCHITECTURE, "initializer_range": 0.2})
    plain = config.build(tokenizer, seed=6).eval()
    adapted = replace(config, lora=lora).build(tokenizer, seed=6).eval()
    torch.testing.assert_close(compute_logits(adapted, IDS), compute_logits(plain, IDS))
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in trained.values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    expected = compute_logits(adapted, IDS)
    assert (expected - compute_logits(plain, IDS)).abs().max() > 0.01
    save_model(adapted, tokenizer, tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        assert not any("lora" in name for name in file.keys())  # noqa: SIM118 - no mapping
    merged = BackboneConfig(source=str(tmp_path / "merged")).build(tokenizer).eval()
    torch.testing.assert_close(compute_logits(merged, IDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"^backbone\.lora\.rank: expected an integer of at least 1, got 0"),
        ({"dropout": 1.0}, r"^backbone\.lora\.dropout: expected a number in \[0, 1\), got 1\.0"),
        ({"dropout": -0.1}, r"^backbone\.lora\.dropout: expected a number in \[0, 1\), got -0\.1"),
    ],
)
def test_impossible_adapters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraOptions(**options)


def test_adapters_learn_under_checkpointing() -> None:
    config = BackboneConfig(config={**ARCHITECTURE, "initializer_range": 0.5}, lora=LORA)
    plain, saved = gradients(config), gradients(replace(config, gradient_checkpointing=True))
    assert plain.keys() == saved.keys()
    assert any(value.abs().sum() > 0 for value in plain.values())
    for name, value in plain.items():
        torch.testing.assert_close(saved[name], value)


def test_an_adapted_model_decodes_with_a_cache() -> None:
    backbone = BackboneConfig(config=ARCHITECTURE, lora=LORA).build(masked_tokenizer(), seed=1).eval()
    cache = backbone.make_cache(1)
    whole = compute_logits(backbone, IDS[:1])
    cache.prepare([0], 7, torch.arange(7), torch.zeros(7, dtype=torch.long), torch.arange(7))
    mask = torch.ones(1, 7, 7, dtype=torch.bool).tril()
    with torch.no_grad():
        hidden = backbone.hidden_states(IDS[:1], torch.arange(7)[None], mask, cache)
        torch.testing.assert_close(backbone.logits(hidden), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "^backbone: expected a source .* or a config with model_type"),
        ({"config": {"hidden_size": 8}}, "^backbone: expected a source .* or a config with model_type"),
        ({"source": "x", "attention": "block_causal"}, "^block_size: expected a value if and only if"),
        ({"source": "x", "attention": "causal", "block_size": 4}, "^block_size: expected a value if and only if"),
        ({"source": "x", "block_size": 4}, "^block_size: expected a value if and only if"),
    ],
)
def test_impossible_options_are_refused_when_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackboneConfig(**options)


def test_sources_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    config = BackboneConfig(source=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"^backbone\.source: expected .*nowhere"):
        config.build(masked_tokenizer())
    (tmp_path / "config.json").write_text((MID / "config.json").read_text())
    with pytest.raises(ValueError, match=r"^backbone\.source: .* cannot be loaded"):
        BackboneConfig(source=str(tmp_path)).build(masked_tokenizer())


def test_overrides_that_the_architecture_does_not_know_are_refused() -> None:
    config = BackboneConfig(source=str(MID), config={"num_hiden_layers": 1})
    with pytest.raises(ValueError, match=r"^backbone\.config: .*num_hiden_layers.*num_hidden_layers"):
        config.build(AutoTokenizer.from_pretrained(MID))


@pytest.mark.parametrize("options", [{"pad_token_id": 10**6}, {"hidden_act": "no such"}])
def test_a_config_from_which_transformers_builds_no_model_is_refused(options: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BackboneConfig(config={"model_type": "llama", **sizes, **options})
    with pytest.raises(ValueError, match=r"^backbone\.config.*: expected .*, got .*; "):
        config.build(masked_tokenizer())


def test_the_base_of_rotary_positions_is_overridden_among_their_parameters() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MID)
    base = {"rope_type": "default", "rope_theta": 500.0}
    backbone = BackboneConfig(source=str(MID), config={"rope_parameters": base}).build(tokenizer)
    frequencies = backbone.model.get_submodule("model.rotary_emb").get_buffer("inv_freq")
    head_dim = backbone.config.head_dim
    torch.testing.assert_close(frequencies[1], torch.tensor(500.0 ** (-2 / head_dim)))


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"rope_theta": 500.0}, r"^backbone\.config: .*rope_theta.*rope_parameters", id="beside rope_parameters"
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 500.0}},
            r"^backbone\.config\.rope_parameters: expected rope_type and rope_theta",
            id="without rope_type",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"^backbone\.config\.rope_scaling: expected rope_type and",
            id="without rope_theta",
        ),
    ],
)
def test_incomplete_parameters_of_rotary_positions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackboneConfig(source=str(MID), config=options).build(AutoTokenizer.from_pretrained(MID))


def test_a_misspelt_option_of_an_architecture_is_refused_and_what_transformers_wrote_is_not() -> None:
    tokenizer = masked_tokenizer()
    with pytest.raises(ValueError, match=r"^backbone\.config: .*hidden_sise.*hidden_size"):
        BackboneConfig(config={**ARCHITECTURE, "hidden_sise": 8}).build(tokenizer)
    with pytest.raises(ValueError, match=r"^backbone\.config\.model_type: expected .*'qwen33'.*'qwen3'"):
        BackboneConfig(config={**ARCHITECTURE, "model_type": "qwen33"}).build(tokenizer)
    written = BackboneConfig(config={**ARCHITECTURE, "rope_theta": 500.0}).build(tokenizer).config.to_dict()
    assert written["rope_parameters"]["rope_theta"] == 500.0
    # A config that transformers wrote may have options that only another version of transformers knows.
    BackboneConfig(config={**written, "hidden_sise": 8}).build(tokenizer)


def test_a_gpu_is_the_default_where_cuda_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_found=is_available: is_found)
        assert default_device() == expected
    assert inspect.signature(refusion_lit.load).parameters["device"].default == "auto"
    for command in (chat, generate, serve, trace):
        assert command.build_parser().get_defaults().device == "auto"


@pytest.mark.parametrize(
    ("stored", "device", "has_instructions", "expected"),
    [
        ("bfloat16", "cpu", True, "bfloat16"),
        ("bfloat16", "cpu", False, "float32"),
        ("bfloat16", "cuda", False, "bfloat16"),
        ("float16", "cpu", True, "float32"),
        ("float16", "cuda", False, "float16"),
        ("float64", "cpu", False, "float64"),
        (None, "cuda", True, "float32"),
        ("float8_e4m3fn", "cuda", True, "float32"),
    ],
)
def test_the_type_to_decode_in_is_the_stored_one_where_it_is_fast(
    stored: str | None, device: str, has_instructions: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs compute fast in 16 bits. CPUs do so only in bfloat16, and only with the instructions of AVX512_BF16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    assert decoding_dtype({"dtype": stored}, device) == expected
    assert decoding_dtype(SimpleNamespace(dtype=stored and getattr(torch, stored)), device) == expected


@pytest.mark.filterwarnings("ignore:tokenizer")  # a larger vocabulary than the model's
@pytest.mark.parametrize("has_instructions", [True, False])
def test_auto_loads_a_directory_in_its_own_type(
    tmp_path: Path, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    make_base(tmp_path, "abc")
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    expected = torch.bfloat16 if has_instructions else torch.float32
    assert refusion_lit.load(tmp_path).backbone.head.weight.dtype == expected
    assert refusion_lit.load(tmp_path, dtype="float64").backbone.head.weight.dtype == torch.float64
    config = BackboneConfig(source=str(tmp_path), dtype="auto")
    assert config.build(maskless_tokenizer()).head.weight.dtype == expected


def test_a_source_that_is_not_there_puts_no_process_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(head=unreachable))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ValueError, match=r"^ckpt_path: expected .*no network"):
        ModelSource.open("me/model", option="ckpt_path")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    # A source in the cache does put the process offline, so that no file is asked for on the network.
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "somewhere/config.json")
    ModelSource.open("me/model", option="ckpt_path")
    assert huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_drafter_is_trained_without_gradient_checkpointing() -> None:
    with pytest.raises(ValueError, match=r"^backbone\.gradient_checkpointing: expected false"):
        BackboneConfig(config=ARCHITECTURE, drafter=DrafterOptions(), gradient_checkpointing=True)


def test_weights_that_an_overridden_config_asks_for_are_not_fetched_again(tmp_path: Path) -> None:
    source = make_base(tmp_path / "base", "abc")
    with pytest.raises(ValueError, match=r"^backbone\.source: expected all weights .*backbone\.config"):
        BackboneConfig(source=str(source), config={"attention_bias": True}).build(masked_tokenizer())


def test_models_load_in_threads_at_the_same_time() -> None:
    """transformers replaces functions of torch and of its classes while it builds a model, in all threads."""
    folder = MID.with_name("additions-clean")
    expected = refusion_lit.load(folder, device="cpu").backbone.model.state_dict()

    def check_loads() -> None:  # in a process of its own, whose functions may stay replaced
        with ThreadPoolExecutor(4) as threads:
            models = list(threads.map(lambda _: refusion_lit.load(folder, device="cpu"), range(4)))
        for model in (*models, refusion_lit.load(folder, device="cpu")):
            torch.testing.assert_close(model.backbone.model.state_dict(), expected, rtol=0, atol=0)

    process = fork(check_loads)
    process.join()
    assert process.exitcode == 0
