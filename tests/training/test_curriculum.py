"""The curriculum of slot sizes in training: keyed to the step, so that a resumed run has the same."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from refusion_lit import SlotDiffusionModule
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.objectives import Zarya
from refusion_lit.tasks import Additions
from support.tiny import TINY_QWEN

NUM_STEPS = 8


class Sizes(Callback):
    """Records the slot size of each step."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, ...]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: SlotDiffusionModule, *_: object) -> None:  # type: ignore[override]
        objective = module.training_objective
        assert isinstance(objective, Zarya)
        self.sizes[trainer.global_step] = objective.slot_sizes


def fit(
    directory: Path, max_steps: int = NUM_STEPS, checkpoint: Path | None = None
) -> tuple[SlotDiffusionModule, Sizes]:
    data = InstructionDataModule(Additions(num_train=40, num_validation=4, num_test=4), CharacterTokenizer(), 4, 4)
    objective = Zarya(slot_sizes=(1, 3, 7), slot_borders=(0.25, 0.5, 1.0))
    module, sizes = SlotDiffusionModule(BackboneConfig(config=TINY_QWEN), data.built_tokenizer, objective), Sizes()
    trainer = L.Trainer(
        default_root_dir=directory, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        max_steps=max_steps, max_epochs=-1, limit_val_batches=0, logger=False,
        callbacks=[sizes, ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module, sizes


def test_sizes_follow_the_borders_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    whole, recorded = fit(tmp_path / "whole")
    # The borders are steps 2 and 4 of 8.
    assert recorded.sizes == {0: (1,), 1: (1,), 2: (1,), 3: (3,), 4: (3,), 5: (7,), 6: (7,), 7: (7,)}
    resumed, recorded_after = fit(tmp_path / "resumed", checkpoint=tmp_path / "whole" / "step=3.ckpt")
    assert recorded_after.sizes == {step: size for step, size in recorded.sizes.items() if step >= 3}
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_training_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_steps: expected a number above 0 here or in trainer"):
        fit(tmp_path, max_steps=-1)
