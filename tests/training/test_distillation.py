"""Adapters that learn what the model without them predicts (D2F), against transformers' model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_lit import SlotDiffusionModule
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.modeling.lora import LoraOptions
from refusion_lit.objectives import DiffusionForcing
from refusion_lit.tasks import Additions
from refusion_lit.training.optimizer import WarmupCosine
from tiny import TINY_QWEN

pytest.importorskip("peft")
LORA = LoraOptions(rank=4, alpha=8.0, dropout=0.1)


def parts(objective: DiffusionForcing, lora: LoraOptions | None = LORA) -> tuple[SlotDiffusionModule, ResponseBatch]:
    torch.manual_seed(0)  # the adapters' first weights
    data = InstructionDataModule(Additions(num_train=64, num_validation=4, num_test=4), CharacterTokenizer(), 5, 5)
    module = SlotDiffusionModule(
        BackboneConfig(config=TINY_QWEN, lora=lora), data.built_tokenizer, objective,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), schedule=WarmupCosine(warmup_steps=1),
    )  # fmt: skip
    module.configure_model()
    data.setup("fit")
    batch = next(iter(data.train_dataloader())).batch
    assert isinstance(batch, ResponseBatch)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return module, batch


def logits_of(
    module: SlotDiffusionModule, row: int, corrupted: CorruptedBatch, mask: Tensor, *, adapted: bool
) -> Tensor:
    """Compute a row's logits with transformers, weights W or W + alpha / r B A, and a mask of [token, token]."""
    state = module.model.model.get_base_model().state_dict()
    weights = {name.replace(".base_layer", ""): value for name, value in state.items() if "lora_" not in name}
    for name in state if adapted else ():
        if "lora_A" in name:
            update = state[name.replace("lora_A", "lora_B")] @ state[name]
            target = name.replace(".lora_A.default", "")
            weights[target] = weights[target] + LORA.alpha / LORA.rank * update
    assert isinstance(module.model.config, Qwen3Config)
    model = Qwen3ForCausalLM(module.model.config).eval()
    model.load_state_dict(weights)
    length = len(mask)
    additive = torch.zeros(1, 1, length, length).masked_fill(~mask, -torch.inf)
    with torch.no_grad():
        return model(
            input_ids=corrupted.input_ids[row : row + 1, :length], attention_mask=additive,
            position_ids=torch.arange(length)[None],
        ).logits[0]  # fmt: skip


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_is_the_divergence_from_the_bidirectional_model(shifted: bool) -> None:
    module, batch = parts(DiffusionForcing(block_size=4, shifted=shifted, distill=True))
    module.eval()
    corrupted = module.corrupt(batch)
    with torch.no_grad():
        found = module.loss(corrupted)
    assert corrupted.attention_mask is not None
    total, num = 0.0, 0
    for row in range(len(batch.input_ids)):
        length = int(corrupted.is_real[row].sum())  # type: ignore[index]
        everything = torch.ones(length, length, dtype=torch.bool)
        teacher = logits_of(module, row, corrupted, everything, adapted=False).log_softmax(-1)
        own = corrupted.attention_mask[row, :length, :length]
        assert not own.all()
        student = logits_of(module, row, corrupted, own, adapted=True).log_softmax(-1)
        for place in (corrupted.labels[row] != IGNORE_INDEX).nonzero().flatten().tolist():
            divergence = (teacher[place].exp() * (teacher[place] - student[place])).sum()
            total += float(divergence * corrupted.weights[row, place])
            num += 1
    assert total / num > 0.01
    torch.testing.assert_close(float(found.total), total / num, rtol=1e-4, atol=1e-5)

    rows = torch.tensor([0, 1, 0, 1, 0])
    with torch.no_grad():
        packed = module.loss(module.corrupt(replace(batch, rows=rows)))
    torch.testing.assert_close(packed.total, found.total, rtol=1e-4, atol=1e-5)


def test_training_moves_the_adapters_alone_and_lowers_the_loss(tmp_path: Path) -> None:
    module, batch = parts(DiffusionForcing(block_size=4, distill=True))
    corrupted = module.corrupt(batch)
    module.train()
    module.loss(corrupted).total.backward()
    assert module.training
    assert {name for name, weight in module.named_parameters() if weight.grad is not None and weight.grad.any()} == {
        name for name, weight in module.named_parameters() if "lora_" in name
    }
    data = InstructionDataModule(Additions(num_train=64, num_validation=4, num_test=4), CharacterTokenizer(), 5, 5)
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=30, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip

    def loss() -> float:
        module.eval()  # no dropout
        found = module.loss(corrupted).total.item()
        module.train()
        return found

    before = loss()
    trainer.fit(module, data)
    assert loss() < 0.5 * before


def test_distillation_without_adapters_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"objective\.distill: expected a model with backbone\.lora, got 'one without'"
    ):
        parts(DiffusionForcing(distill=True), lora=None)
