"""Adapters that a policy has trained are merged into the trained model, and a drafter for it changes no logits.

``tests/modeling/test_lora.py`` has the same grid with adapters of random values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from refusion_lit import SlotDiffusionModule, load
from refusion_lit.cli import main
from refusion_lit.contrib.rl import GroupPolicy, Reward
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import DrafterOptions
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.lora import LoraOptions
from refusion_lit.objectives import GatedDraft
from refusion_lit.tasks import Additions, Example
from support.tiny import make_base

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

CHARACTERS = "0123456789+=,;>"
MASK = 2 + len(CHARACTERS)
IDS = torch.tensor([[5, 6, MASK, 9, 4, MASK, 7]])


class LastDigit(Reward):
    """The last character's code, so that the answers of a group differ."""

    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        return [float(ord(response[-1])) if response else 0.0 for response in responses]


def our_logits(backbone: Backbone) -> Tensor:
    with torch.no_grad():
        return backbone.eval().logits(backbone(IDS, torch.arange(IDS.shape[1])[None]))


def library_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def fit(objective: Any, backbone: BackboneConfig, source: Path) -> L.Trainer:
    """Train for three steps with a high learning rate."""
    data = InstructionDataModule(
        Additions(max_terms=2, num_train=16, num_validation=2, num_test=2), PretrainedTokenizer(source=str(source)), 4
    )
    module = SlotDiffusionModule(
        backbone, data.built_tokenizer, objective, decoders={"first": Autoregressive()},
        optimizer=lambda groups: torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, logger=False, limit_val_batches=0, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("mask", ["added row", "spare row", "in the vocabulary"])
@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "embed_tokens"]])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_policy_and_a_drafter_keep_the_trained_logits(
    tmp_path: Path, tied: bool, target_modules: list[str] | str, mask: str
) -> None:
    characters: Any = [*CHARACTERS, "<|mask|>"] if mask == "in the vocabulary" else CHARACTERS
    base = make_base(tmp_path / "base", characters, tied=tied, num_rows=MASK + 5 if mask == "spare row" else None)
    before = our_logits(load(base, device="cpu").backbone)
    objective = GroupPolicy(rewards=(LastDigit(),), group_size=3, max_new_tokens=4, kl_weight=0.1)
    lora = LoraOptions(rank=2, alpha=16.0, target_modules=target_modules)
    trainer = fit(objective, BackboneConfig(source=str(base), lora=lora), base)
    module: Any = trainer.lightning_module
    expected = our_logits(module.model)
    assert (expected - before).abs().max() > 1e-2

    def assert_equal(logits: Tensor) -> None:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    checkpoint, export = tmp_path / "trained.ckpt", tmp_path / "export"
    trainer.save_checkpoint(checkpoint)
    assert_equal(our_logits(load(checkpoint, device="cpu").backbone))
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={export}"]) == 0
    assert_equal(our_logits(load(export, device="cpu").backbone))
    assert_equal(library_logits(AutoModelForCausalLM.from_pretrained(export)))

    alone = tmp_path / "adapters"
    is_refused = target_modules != "all-linear" and (tied or mask != "in the vocabulary")
    command = ["export", f"--ckpt_path={checkpoint}", f"--output={alone}", "--adapter_only=true"]
    assert main(command) == (2 if is_refused else 0)
    if not is_refused:
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        if mask == "added row":
            model.resize_token_embeddings(MASK + 1)
        assert_equal(library_logits(peft.PeftModel.from_pretrained(model, alone).merge_and_unload()))

    drafting = fit(GatedDraft(), BackboneConfig(source=str(export), drafter=DrafterOptions()), export)
    drafting.save_checkpoint(tmp_path / "draft.ckpt")
    assert_equal(our_logits(load(tmp_path / "draft.ckpt", device="cpu").backbone))
    both, draft = tmp_path / "both", tmp_path / "draft"
    assert main(["export", f"--ckpt_path={tmp_path / 'draft.ckpt'}", f"--output={draft}", "--adapter_only=true"]) == 0
    assert main(["export", f"--ckpt_path={export}", f"--draft={draft}", f"--output={both}"]) == 0
    assert_equal(library_logits(AutoModelForCausalLM.from_pretrained(both)))
