"""A model with trained adapters has the same logits merged, in a checkpoint, exported, and as adapters alone."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import refusion_lit
from refusion_lit.checkpoints.metadata import METADATA_KEY, CheckpointMetadata
from refusion_lit.checkpoints.models import restore_metadata
from refusion_lit.cli import main
from refusion_lit.data.tokenizers import load_tokenizer
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import DrafterOptions
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.lora import LoraOptions, merge_adapters
from refusion_lit.modeling.saving import save_adapters, save_model
from refusion_lit.modeling.source import ModelSource
from refusion_lit.text_model import TextModel
from support.tiny import make_base

peft = pytest.importorskip("peft")

CHARACTERS = "0123456789+=,;>"
MASK = 2 + len(CHARACTERS)  # the id after "<pad>", "<eos>" and the characters
IDS = torch.tensor([[5, 6, MASK, 9, 4, MASK, 7]])
POSITIONS = torch.arange(IDS.shape[1])[None]


def _logits(backbone: Backbone) -> Tensor:
    with torch.no_grad():
        return backbone.logits(backbone(IDS, POSITIONS))


def _library_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def _adapt(source: Path, target_modules: list[str] | str) -> TextModel:
    """Return a model whose adapters differ from zero, as after a training."""
    opened = ModelSource.open(str(source), option="source")
    tokenizer = load_tokenizer(opened)
    options = LoraOptions(rank=4, target_modules=target_modules)
    backbone = BackboneConfig(source=str(source), lora=options).build(tokenizer, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in backbone.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return TextModel(backbone, tokenizer, "{query}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", ["added row", "spare row", "in the vocabulary"])
@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj"], ["q_proj", "embed_tokens"], r".*embed_tokens"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_way_out_has_the_trained_logits(
    tmp_path: Path, tied: bool, target_modules: list[str] | str, mask: str
) -> None:
    characters: Any = [*CHARACTERS, "<|mask|>"] if mask == "in the vocabulary" else CHARACTERS
    base = make_base(tmp_path / "base", characters, tied=tied, num_rows=MASK + 5 if mask == "spare row" else None)
    trained = _adapt(base, target_modules)
    backbone = trained.backbone
    expected = _logits(backbone)
    base_logits = _logits(BackboneConfig(source=str(base)).build(trained.tokenizer).eval())
    assert (expected - base_logits).abs().max() > 0.1
    with backbone.model.disable_adapter():  # so reinforcement learning computes the reference of a policy
        torch.testing.assert_close(_logits(backbone), base_logits)
    _assert_close(_library_logits(merge_adapters(deepcopy(backbone.model))), expected)
    _check_checkpoint(trained, expected, tmp_path / "trained.ckpt")
    adapts_embedding = target_modules not in ("all-linear", ["q_proj"])
    if adapts_embedding and (tied or mask != "in the vocabulary"):
        with pytest.raises(ValueError, match=r"adapter_only: expected .* export without adapter_only"):
            save_adapters(deepcopy(backbone), trained.tokenizer, tmp_path / "adapters")
        assert not (tmp_path / "adapters").exists()
    else:
        _check_adapters(trained, base, expected, tmp_path / "adapters", adds_row=mask == "added row")
    _check_export(trained, expected, tmp_path / "export")


def _assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def _make_checkpoint(model: TextModel) -> dict[str, Any]:
    """Return a checkpoint as a training saves it."""
    state = {f"backbone.{name}": value.clone() for name, value in model.backbone.state_dict().items()}
    return {METADATA_KEY: CheckpointMetadata.from_model(model).to_checkpoint(), "state_dict": state}


def _check_checkpoint(trained: TextModel, expected: Tensor, path: Path) -> None:
    """Check the logits of a checkpoint that is loaded to decode, and as ``test`` does."""
    checkpoint = _make_checkpoint(trained)
    torch.save(checkpoint, path)
    _assert_close(_logits(refusion_lit.load(path).backbone), expected)
    config = CheckpointMetadata.from_model(trained).backbone_config().config
    tested = BackboneConfig(config=config).build(trained.tokenizer)
    restore_metadata(checkpoint, tested, trained.tokenizer, resumes=False)
    tested.load_state_dict({name.removeprefix("backbone."): value for name, value in checkpoint["state_dict"].items()})
    _assert_close(_logits(tested.eval()), expected)


def _check_adapters(trained: TextModel, base: Path, expected: Tensor, path: Path, *, adds_row: bool) -> None:
    """Check the logits of the adapters alone, which peft applies to the base model."""
    save_adapters(deepcopy(trained.backbone), trained.tokenizer, path)
    model = AutoModelForCausalLM.from_pretrained(base)
    if adds_row:
        model.resize_token_embeddings(MASK + 1)
    model = peft.PeftModel.from_pretrained(model, path)
    _assert_close(_library_logits(model), expected)
    _assert_close(_library_logits(model.merge_and_unload()), expected)


def _check_export(trained: TextModel, expected: Tensor, path: Path) -> None:
    """Check the logits of an export in transformers, here, and as the base of another training."""
    save_model(trained.backbone, trained.tokenizer, path)
    _assert_close(_library_logits(AutoModelForCausalLM.from_pretrained(path)), expected)
    exported = refusion_lit.load(path)
    _assert_close(_logits(exported.backbone), expected)
    with_drafter = BackboneConfig(source=str(path), drafter=DrafterOptions())
    _assert_close(_logits(with_drafter.build(exported.tokenizer).eval()), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", ["added row", "in the vocabulary"])
def test_a_head_that_is_stored_beside_a_config_that_ties_it_is_kept(tmp_path: Path, mask: str) -> None:
    """Such a head is kept by transformers, too, until rows are added to it."""
    characters: Any = [*CHARACTERS, "<|mask|>"] if mask == "in the vocabulary" else CHARACTERS
    base = make_base(tmp_path / "base", characters, tied=False)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    ids = IDS[:, :2]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits
    loaded = refusion_lit.load(base).backbone
    with torch.no_grad():
        logits = loaded.logits(loaded(ids, POSITIONS[:, :2]))
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected, rtol=1e-5, atol=1e-5)

    trained = _adapt(base, "all-linear")
    expected = _logits(trained.backbone)
    torch.save(_make_checkpoint(trained), tmp_path / "trained.ckpt")
    torch.testing.assert_close(_logits(refusion_lit.load(tmp_path / "trained.ckpt").backbone), expected)
    for name, options in (("export", []), ("adapters", ["--adapter_only=true"])):
        arguments = ["export", f"--ckpt_path={tmp_path / 'trained.ckpt'}", f"--output={tmp_path / name}", *options]
        assert main(arguments) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(_library_logits(exported), expected, rtol=1e-5, atol=1e-5)
    example = re.search(r"```python\n(.*?)```", (tmp_path / "adapters" / "README.md").read_text(), re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example.group(1), names)  # as the model card shows
    torch.testing.assert_close(_library_logits(names["model"]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target_modules", [["lm_head"], ["q_proj", "lm_head"], r".*(lm_head|q_proj)"])
def test_the_head_is_refused_by_the_options_name(tmp_path: Path, tied: bool, target_modules: list[str] | str) -> None:
    base = make_base(tmp_path / "base", CHARACTERS, tied=tied)
    with pytest.raises(ValueError, match=r"backbone\.lora\.target_modules: expected .*head"):
        _adapt(base, target_modules)


def test_a_mask_token_that_the_vocabulary_holds_keeps_its_row(tmp_path: Path) -> None:
    characters: Any = [*CHARACTERS, "<|mask|>", "a"]
    base = make_base(tmp_path / "base", characters)
    expected = AutoModelForCausalLM.from_pretrained(base).model.embed_tokens.weight
    loaded = refusion_lit.load(base)
    assert loaded.backbone.special_tokens.mask_token_id == MASK
    assert torch.equal(loaded.backbone.body.get_submodule("embed_tokens").weight, expected)
