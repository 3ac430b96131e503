"""Published checkpoints load without their Python code, and compute what the authors' classes compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import refusion_lit
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import BlockDiffusion, Decoder, LLaDA, ReFusion, WeDLM
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.saving import save_model
from refusion_lit.text_model import TextModel
from refusion_lit.types import ModelTraits
from support.attention_masks import order_mask, pattern_order
from support.published import MODELS, published_model, reference

QWEN: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 24,
}
MASKED, SHIFTED = ("mask",), ("mask_shifted",)


def compute_logits(model: TextModel, tokens: list[int]) -> Tensor:
    backbone = model.backbone
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    mask = order_mask(pattern_order(backbone.traits, positions), torch.tensor([len(tokens)]))
    if backbone.traits.attention == "causal":
        mask = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril()
    with torch.no_grad():
        return backbone.logits(backbone.hidden_states(ids, positions, mask))[0]


def write_config(path: Path, options: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(options))
    return path


def config_in(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def copy_model(name: str, path: Path) -> Path:
    return Path(shutil.copytree(MODELS[name], path))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("float32", 1e-4)])
@pytest.mark.parametrize("family", ["llada", "dream", "fast_dllm_v2"])
def test_logits_are_those_of_the_authors_class(family: str, dtype: str, tolerance: float) -> None:
    golden = reference(f"{family}_logits")
    model = published_model(golden["model"], dtype)
    for tokens, expected in zip(golden["inputs"], golden["logits"], strict=True):
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(compute_logits(model, tokens).double(), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("name", "traits", "mask", "ends", "decoder"),
    [
        (
            "llada-tiny", ModelTraits(attention="bidirectional", predictions=MASKED), 18, (17, 19),
            LLaDA(block_length=32),
        ),
        (
            "dream-tiny", ModelTraits(attention="bidirectional", predictions=SHIFTED), 20, (16, 18),
            LLaDA(order="entropy", confidence="tempered", shifted=True),
        ),
        (
            "fast-dllm-v2-tiny", ModelTraits(attention="block_causal", block_size=32, predictions=SHIFTED), 19,
            (18, 16),
            BlockDiffusion(block_size=32, sub_block_size=8, shifted=True, threshold=1.0),
        ),
        ("bd3lm-tiny", ModelTraits(), 17, (16,), ReFusion()),
    ],
)  # fmt: skip
def test_traits_ids_and_decoder_come_from_the_layout(
    name: str, traits: ModelTraits, mask: int, ends: tuple[int, ...], decoder: Decoder
) -> None:
    model = published_model(name)
    assert model.backbone.traits == traits
    special = model.backbone.special_tokens
    assert (special.mask_token_id, special.eos_token_ids) == (mask, ends)
    assert special.vocab_size == len(model.tokenizer) < model.backbone.head.weight.shape[0] == 32, "no token was added"
    assert model.default_decoder == decoder


def test_an_export_in_our_layout_keeps_traits_ends_and_decoder(tmp_path: Path) -> None:
    for name in ("llada-tiny", "dream-tiny", "fast-dllm-v2-tiny"):
        model = published_model(name)
        save_model(model.backbone, model.tokenizer, tmp_path / name)
        again = refusion_lit.load(tmp_path / name)
        assert again.tokenizer("12+ 3")["input_ids"] == model.tokenizer("12+ 3")["input_ids"]
        assert again.backbone.traits == model.backbone.traits
        assert again.backbone.special_tokens == model.backbone.special_tokens
        assert again.default_decoder == model.default_decoder
        assert torch.equal(compute_logits(again, [1, 2, 3, 4]), compute_logits(model, [1, 2, 3, 4]))


def qwen_tokenizer(mask: str) -> PreTrainedTokenizerFast:
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", mask, *[chr(ord("a") + i) for i in range(16)]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": words[0], "eos_token": words[2], "extra_special_tokens": [mask]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    ("layout", "base", "published", "mask", "traits", "decoder"),
    [
        (
            "sdar", "qwen3", {"model_type": "sdar", "block_size": 4, "mask_token_id": 3, "fuse_cross_entropy": True,
                              "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig"}},
            "<|MASK|>", ModelTraits(attention="block_causal", block_size=4, predictions=MASKED),
            BlockDiffusion(block_size=4, threshold=0.85, confidence="tempered", fused=False),
        ),
        (
            "wedlm", "qwen3", {"model_type": "wedlm", "qk_norm": True}, "<|mask|>",
            ModelTraits(predictions=("mask", "next_token")), WeDLM(),
        ),
        ("wedlm", "qwen2", {"model_type": "wedlm", "qk_norm": False}, "<|mask|>",
         ModelTraits(predictions=("mask", "next_token")), WeDLM()),
        (
            "open_dllm", "qwen2", {"model_type": "qwen2", "mask_token_id": 3}, "<M>",
            ModelTraits(attention="bidirectional", predictions=SHIFTED),
            LLaDA(order="entropy", confidence="tempered", shifted=True),
        ),
        (
            "zarya", "qwen3",
            {"model_type": "zarya", "backbone_class": "Qwen3ForCausalLM", "alpha_0": 0.75, "mask_token_id": 3},
            "<|mdm_mask|>", ModelTraits(predictions=("mask", "next_token_in_slot")),
            ReFusion(slot_size=16, num_serial_blocks=4, slot_threshold=0.9, token_threshold=0.4),
        ),
    ],
)  # fmt: skip
def test_layouts_without_a_golden_are_renamings_too(
    layout: str, base: str, published: dict[str, Any], mask: str, traits: ModelTraits, decoder: Decoder, tmp_path: Path
) -> None:
    """A layout without a golden stores the weights of a model of transformers, with other options in its config.

    Args:
        layout: Name of the layout.
        base: Type of the model of transformers.
        published: Options of the config that the layout adds or replaces.
        mask: The mask token, whose id is 3 (see ``qwen_tokenizer``).
        traits: The traits that loading should read.
        decoder: The default decoder that loading should choose.
        tmp_path: A directory.
    """
    tokenizer = qwen_tokenizer(mask)
    tokenizer.add_special_tokens({"mask_token": mask})
    options = dict(QWEN)
    if base != "qwen3":
        del options["attention_bias"]  # no option of Qwen2
    plain = BackboneConfig(config={"model_type": base, **options}).build(tokenizer, seed=0)
    weights = {name: weight.detach() for name, weight in plain.model.named_parameters()}
    prefix = "backbone." if layout == "zarya" else ""
    (tmp_path / "theirs").mkdir()
    save_file({prefix + name: weight for name, weight in weights.items()}, tmp_path / "theirs" / "model.safetensors")
    write_config(tmp_path / "theirs", {**options, **published, "eos_token_id": 2})
    tokenizer.save_pretrained(tmp_path / "theirs")
    name = "open_dllm" if layout == "open_dllm" else None
    overrides = BackboneConfig(source="x", checkpoint_format=name)
    model = refusion_lit.load(tmp_path / "theirs", overrides=overrides)
    assert (model.backbone.traits, model.default_decoder) == (traits, decoder)
    assert model.backbone.special_tokens.mask_token_id == 3
    (row,) = model.generate_ids([[4, 5, 6]], max_new_tokens=64)
    assert row.token_ids
    assert not {0, 3} & set(row.token_ids)
    loaded = dict(model.backbone.model.named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("published", "mask", "traits"),
    [
        (
            {"model_type": "sdar", "block_size": 8}, "<|MASK|>",
            ModelTraits(attention="block_causal", block_size=8, predictions=MASKED),
        ),
        (
            {"model_type": "zarya", "backbone_class": "Qwen3ForCausalLM"}, "<|mdm_mask|>",
            ModelTraits(predictions=("mask", "next_token_in_slot")),
        ),
    ],
)  # fmt: skip
def test_block_size_and_scaled_positions_are_read(
    published: dict[str, Any], mask: str, traits: ModelTraits, tmp_path: Path
) -> None:
    tokenizer = qwen_tokenizer(mask)
    tokenizer.add_special_tokens({"mask_token": mask})
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    options = {**QWEN, "rope_scaling": dict(scaling)}
    plain = BackboneConfig(config={**options, "model_type": "qwen3"}).build(tokenizer, seed=0)
    prefix = "backbone." if published["model_type"] == "zarya" else ""
    weights = {prefix + name: weight.detach() for name, weight in plain.model.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    write_config(
        tmp_path, {**options, **published, "rope_scaling": dict(scaling), "mask_token_id": 3, "eos_token_id": 2}
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = refusion_lit.load(tmp_path)
    assert loaded.backbone.traits == traits
    assert loaded.backbone.config.rope_parameters == plain.config.rope_parameters
    assert loaded.backbone.config.rope_parameters["factor"] == 4.0


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0")  # transformers 5.15 reads the files in an old way
def test_dreams_slow_tokenizer_is_read_without_its_code(tmp_path: Path) -> None:
    folder = copy_model("dream-tiny", tmp_path / "dream")
    (folder / "tokenizer.json").unlink()
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet()})
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
    words = [*letters, "he", "hel"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    entry = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    added = {str(len(words) + i): {"content": word, **entry} for i, word in enumerate(special)}
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    stored |= {"added_tokens_decoder": added, "tokenizer_class": "DreamTokenizer",
               "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(stored))
    (folder / "tokenization_dream.py").write_text("raise RuntimeError('code of the checkpoint ran')\n")
    write_config(folder, {**config_in(folder), "mask_token_id": len(words) + 4, "eos_token_id": len(words)})
    tokenizer = PretrainedTokenizer(source=str(folder)).build(None)
    ids = tokenizer("help 12", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["hel", "p", "\u0120", "1", "2"]
    assert tokenizer.decode(ids) == "help 12"
    assert tokenizer.mask_token_id == len(words) + 4


def test_shards_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = copy_model("llada-tiny", tmp_path / "llada")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = refusion_lit.load(folder)
    assert torch.equal(compute_logits(whole, [1, 2, 3]), compute_logits(published_model("llada-tiny"), [1, 2, 3]))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^backbone\.source: .*model-00002-of-00003"):
        refusion_lit.load(folder)
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"12345678{")
    with pytest.raises(ValueError, match=r"^backbone\.source: .* cannot be loaded"):
        refusion_lit.load(folder)


def test_weights_of_another_layout_are_refused_by_their_shapes(tmp_path: Path) -> None:
    """Dream's query heads share key heads, and LLaDA's do not."""
    path = copy_model("llada-tiny", tmp_path / "model")
    shutil.copy(MODELS["dream-tiny"] / "model.safetensors", path / "model.safetensors")
    with pytest.raises(ValueError, match=r"k_proj\.weight .*\(48, 96\).*\(96, 96\)"):
        refusion_lit.load(path)


def test_a_missing_weight_is_refused_by_its_published_name(tmp_path: Path) -> None:
    path = copy_model("llada-tiny", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights.pop("model.transformer.blocks.1.attn_out.weight")
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"got none for model\.transformer\.blocks\.1\.attn_out\.weight"):
        refusion_lit.load(path)


def test_a_tokenizer_without_the_layouts_mask_token_is_refused(tmp_path: Path) -> None:
    path = copy_model("fast-dllm-v2-tiny", tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / file).read_text().replace("|<MASK>|", "|<other>|")
        (path / file).write_text(text)
    with pytest.raises(ValueError, match=r"^tokenizer\.source: expected the mask token \|<MASK>\|"):
        refusion_lit.load(path)


def test_an_option_that_the_layout_cannot_express_is_refused(tmp_path: Path) -> None:
    path = copy_model("llada-tiny", tmp_path / "model")
    write_config(path, {**config_in(path), "alibi": True})
    with pytest.raises(ValueError, match=r"^backbone\.source: alibi: expected False in the config of a llada"):
        refusion_lit.load(path)


def test_an_incomplete_config_is_refused(tmp_path: Path) -> None:
    path = copy_model("llada-tiny", tmp_path / "model")
    write_config(path, {name: value for name, value in config_in(path).items() if name != "d_model"})
    with pytest.raises(ValueError, match=r"^backbone\.source: expected a complete config of a llada checkpoint"):
        refusion_lit.load(path)


def test_an_unknown_layout_is_refused_with_all_known_layouts(tmp_path: Path) -> None:
    path = copy_model("dream-tiny", tmp_path / "model")
    write_config(path, {**config_in(path), "model_type": "somebodys"})
    with pytest.raises(ValueError, match=r"^backbone\.source: .*got model_type 'somebodys'") as caught:
        refusion_lit.load(path)
    assert all(name in str(caught.value) for name in FORMATS)
    assert "\n" not in str(caught.value)


def test_layouts_are_not_mixed_up() -> None:
    with pytest.raises(ValueError, match=r"^checkpoint_format: expected llada for model_type 'llada', got 'dream'"):
        refusion_lit.load(MODELS["llada-tiny"], overrides=BackboneConfig(source="x", checkpoint_format="dream"))
    with pytest.raises(ValueError, match=r"^checkpoint_format: expected one of .*llada, dream.*, got 'lada'"):
        refusion_lit.load(MODELS["llada-tiny"], overrides=BackboneConfig(source="x", checkpoint_format="lada"))
