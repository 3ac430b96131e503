"""The search for the noise interval whose loss varies least, against a slow one, and over a resumed run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

from refusion_lit import SlotDiffusionModule
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.families.block_diffusion.schedule import clipped_intervals
from refusion_lit.learning.batch import IGNORE_INDEX
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockMasked
from refusion_lit.tasks import Additions
from tiny import TINY_QWEN

SIZE = 4


def parts(num_trained: int = 1000, **options: Any) -> tuple[SlotDiffusionModule, InstructionDataModule]:
    task = Additions(num_train=24, num_validation=10, num_test=4)
    data = InstructionDataModule(task, CharacterTokenizer(), 8, 4)
    options: dict[str, Any] = {
        "block_size": SIZE,
        "search_widths": (0.3, 0.6),
        "search_every": 2,
        "search_delta": 0.2,
    } | options
    module = SlotDiffusionModule(
        BackboneConfig(config=TINY_QWEN),
        data.built_tokenizer,
        BlockMasked(**options),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step < num_trained),
    )
    return module, data


def fitted(
    directory: Path, num_steps: int, checkpoint: Path | None = None, **options: Any
) -> tuple[SlotDiffusionModule, InstructionDataModule, L.Trainer]:
    module, data = parts(**options)
    trainer = L.Trainer(
        default_root_dir=directory, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        max_steps=num_steps, limit_val_batches=0, log_every_n_steps=1, logger=False,
        callbacks=ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1),
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module, data, trainer


def slow_scores(module: SlotDiffusionModule, data: InstructionDataModule, num_batches: int) -> list[float]:
    """Score each interval: variance of the blocks' mean token losses, summed over the batches."""
    objective, special = module.objective, module.model.special_tokens
    assert isinstance(objective, BlockMasked)
    scores = []
    for low, high in clipped_intervals(objective.search_widths, objective.search_delta):
        candidate, score = BlockMasked(block_size=SIZE, t_min=low, t_max=high, shifted=objective.shifted), 0.0
        for batch in list(data.val_dataloader())[:num_batches]:
            noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=-1)
            corrupted = candidate.corrupt(batch, noise, special)
            with torch.no_grad():
                hidden = module.model(corrupted.input_ids, corrupted.position_ids, corrupted.attention_mask)
                logits = module.model.logits(hidden)
            losses = F.cross_entropy(logits.mT, corrupted.labels, reduction="none", ignore_index=IGNORE_INDEX)
            losses = (losses * corrupted.weights).tolist()
            means = []
            for row, (prompt, response) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
                length = -(-int(prompt + response) // SIZE) * SIZE  # filled up with ends of sequence
                for start in range(int(prompt) // SIZE * SIZE, length, SIZE):
                    places = [place for place in range(start, start + SIZE) if place >= prompt]
                    means.append(sum(losses[row][place - candidate.shifted] for place in places) / len(places))
            score += statistics.variance(means)
        scores.append(score)
    return scores


@pytest.mark.parametrize(("shifted", "num_batches"), [(False, 100), (True, 1)])
def test_training_goes_on_with_the_interval_of_the_lowest_variance(
    tmp_path: Path, shifted: bool, num_batches: int
) -> None:
    # The last search is due after step 4: learning rate 0 then leaves the weights as they were.
    module, data, trainer = fitted(tmp_path, 5, num_trained=4, shifted=shifted, search_batches=num_batches)
    scores = slow_scores(module, data, num_batches)
    assert len(scores) == 1 + 4 + 3
    intervals = clipped_intervals((0.3, 0.6), 0.2)
    found = module.training_objective
    assert isinstance(found, BlockMasked)
    assert (found.t_min, found.t_max) == intervals[scores.index(min(scores))]
    assert (found.t_min, found.t_max) != (1e-3, 1.0)
    assert float(trainer.callback_metrics["train/t_min"]) == pytest.approx(found.t_min)
    # Training draws from it.
    batch = next(iter(data.train_dataloader())).batch
    corrupted = module.corrupt(batch)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=module.current_epoch)
    expected = found.corrupt(batch, noise, module.model.special_tokens)
    assert torch.equal(corrupted.input_ids, expected.input_ids)
    whole = module.objective.corrupt(batch, noise, module.model.special_tokens)
    assert not torch.equal(corrupted.input_ids, whole.input_ids)


def test_a_resumed_run_keeps_the_interval_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, _, _ = fitted(tmp_path / "whole", 7)
    for step in (1, 2, 4, 5):  # before the first search, just before one, and after one
        checkpoint = tmp_path / "whole" / f"step={step}.ckpt"
        resumed, _, _ = fitted(tmp_path / f"from {step}", 7, checkpoint)
        assert resumed.training_objective == whole.training_objective
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], weight), (step, name)
    assert whole.training_objective != whole.objective
    without, _ = parts(search_widths=())
    without.configure_model()
    without.on_load_checkpoint(torch.load(checkpoint))
    assert without.training_objective == without.objective, "without a search the options hold"


def test_the_released_widths_give_the_released_intervals() -> None:
    found = clipped_intervals((0.5, 0.6, 0.7, 0.8, 0.9), 0.05)
    assert len(found) == len(set(found)) == 1 + 11 + 9 + 7 + 5 + 3
    assert found[:3] == [(1e-3, 1.0), (1e-3, 0.5), (0.05, 0.55)]
    assert {(0.45, 0.95), (0.3, 0.8), (0.1, 1.0)} <= set(found)
    assert all(1e-3 <= low < high <= 1 for low, high in found)


@pytest.mark.parametrize(
    "options", [{"search_widths": (0.5, 1.0)}, {"search_every": 0}, {"search_delta": 0.0}, {"search_batches": 0},
                {"search_widths": (0.5,), "complementary": True}],
)  # fmt: skip
def test_impossible_searches_are_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=f"^objective.{next(iter(options))}"):
        BlockMasked(**options)
