"""Training from Python by public names: a pretrained model on rows in memory, and arguments of a wrong type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import nn
from torch.utils.data import DataLoader, Dataset

import refusion_lit
from refusion_lit import (
    BackboneConfig,
    CharacterTokenizer,
    InstructionDataModule,
    InstructionFiles,
    PretrainedTokenizer,
    SlotDiffusionModule,
)
from refusion_lit.decoding import ReFusion
from refusion_lit.objectives import Autoregressive, Hybrid, Objective
from refusion_lit.tasks import Additions
from support.tiny import TINY_QWEN
from support.tokenizer_zoo import make_model

ROWS = [{"prompt": f"Where is {name}?", "completion": "France"} for name in ("Paris", "Lyon", "Nice", "Lille")]


class Rows(Dataset[dict[str, str]]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


@pytest.mark.parametrize("make", ["task", "torch", "splits"])
def test_a_pretrained_model_is_trained_on_rows(tmp_path: Path, make: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(make_model("qwen", tmp_path / "base", chat=True))
    task: Any = {
        "task": InstructionFiles.from_rows(ROWS, validation_fraction=0.25),
        "torch": Rows(),
        "splits": {"train": ROWS, "validation": [{**ROWS[0], "prompt": "Where is Metz?"}]},
    }[make]
    tokenizer: Any = Path(source) if make == "splits" else PretrainedTokenizer(source=source)
    data = InstructionDataModule(task, tokenizer, batch_size=2, show_samples=1)
    backbone: Any = Path(source) if make == "torch" else source
    module = SlotDiffusionModule(backbone, objective=Hybrid(slot_sizes=(4,)))
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        num_sanity_val_steps=0, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, data)
    [row] = module.text_model().generate(["Where is Paris?"], max_new_tokens=4)
    assert row.num_tokens <= 4
    num_train = 4 if make == "splits" else 3
    summary = data.describe()
    assert f"{num_train} training samples" in summary
    assert "1 validation samples" in summary
    assert f"2 steps of 2 are {4 / num_train:.3g} epochs" in summary
    assert "<|im_start|>assistant" in summary
    assert "France<|im_end|>" in summary
    assert refusion_lit.load(source).generate(["Where?"], max_new_tokens=2, allow_mismatch=True)


@pytest.mark.parametrize("task", ["rows.jsonl", 3, {"rows": []}, nn.Linear(2, 2)])
def test_what_is_no_task_is_refused_at_once(task: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.task: .*InstructionFiles"):
        InstructionDataModule(task, refusion_lit.CharacterTokenizer())


def test_what_is_no_tokenizer_source_is_refused_at_once() -> None:
    tokenizer: Any = refusion_lit.CharacterTokenizer(characters="ab").build(None)
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*PretrainedTokenizer"):
        InstructionDataModule(Additions(num_train=8), tokenizer)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"backbone": nn.Linear(2, 2)}, "backbone"),
        ({"backbone": None}, "backbone"),
        ({"tokenizer": "Qwen/Qwen3-0.6B"}, "tokenizer"),
        ({"tokenizer": refusion_lit.CharacterTokenizer()}, "tokenizer"),
        ({"objective": Hybrid}, "objective"),
        ({"objective": "Hybrid"}, "objective"),
        ({"decoders": [ReFusion()]}, "decoders"),
        ({"decoders": {"refusion": ReFusion}}, "decoders.refusion"),
        ({"sampling": {"max_new_tokens": 4}}, "sampling"),
        ({"decoding": {"batch_size": 4}}, "decoding"),
        ({"schedule": "cosine"}, "schedule"),
        ({"optimizer": "AdamW"}, "optimizer"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler"),
        ({"prompt_template": "{question}"}, "prompt_template"),
    ],
)
def test_wrong_types_of_a_module_are_refused_at_once(arguments: dict[str, Any], option: str) -> None:
    given: dict[str, Any] = {"backbone": refusion_lit.BackboneConfig(source="some/model"), **arguments}
    with pytest.raises(ValueError, match=f"{option}: expected"):
        SlotDiffusionModule(**given)


@pytest.mark.parametrize("place", ["train_dataloaders", "val_dataloaders"])
def test_loaders_of_rows_are_refused_by_name(tmp_path: Path, place: str) -> None:
    source: Any = str(make_model("qwen", tmp_path / "base", chat=True))
    splits: Any = {"train": ROWS, "validation": ROWS}
    data = InstructionDataModule(splits, source, batch_size=2)
    module = SlotDiffusionModule(source, objective=Hybrid(slot_sizes=(4,)), tokenizer=data.built_tokenizer)
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    loaders: Any = {"train_dataloaders": data.train_dataloader(), "val_dataloaders": data.val_dataloader()} | {
        place: DataLoader(Rows(), batch_size=2)
    }
    with pytest.raises(ValueError, match=r"data: .*InstructionDataModule.*dict"):
        trainer.fit(module, **loaders)


def test_a_module_without_a_tokenizer_names_the_data_module(tmp_path: Path) -> None:
    source: Any = str(make_model("qwen", tmp_path / "base", chat=True))
    module = SlotDiffusionModule(source, objective=Hybrid(slot_sizes=(4,)))
    trainer = L.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"tokenizer: .*InstructionDataModule"):
        trainer.fit(module, DataLoader(Rows(), batch_size=2), DataLoader(Rows()))


class Unnamed(Autoregressive):
    """An objective that names none of its loss terms."""

    term = Objective.term


class TermAndLoss(Hybrid):
    """An objective of two terms, the first of which has the name of the whole loss."""

    @property
    def terms(self) -> dict[str, float]:
        return {"loss": 1.0, "other": 0.5}


@pytest.mark.parametrize("objective", [Unnamed(), TermAndLoss(slot_sizes=(4,))], ids=["unnamed", "loss"])
def test_the_loss_is_logged_as_loss_whatever_its_terms_are_named(objective: Objective) -> None:
    task = Additions(num_train=8, num_validation=4, num_test=1)
    data = InstructionDataModule(task, CharacterTokenizer(), batch_size=4)
    module = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), objective=objective)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, data)
    losses = module.validation.means.compute()
    assert trainer.callback_metrics["val/loss"] == pytest.approx(losses["total"].item())
    assert losses["total"].item() == pytest.approx(
        sum(coefficient * losses[name].item() for name, coefficient in objective.terms.items())
    )
