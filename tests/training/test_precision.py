"""Every precision of the Trainer: fit, test and predict run, and weights that lose their updates are warned of."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from refusion_lit import SlotDiffusionModule
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import ReFusion, decode
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.tasks import Additions
from refusion_lit.training.optimizer import warn_of_lost_updates
from refusion_lit.types import SamplingParams
from support.tiny import TINY_QWEN

MODEL = str(Path(__file__).parents[1] / "goldens" / "models" / "additions-clean")
SAMPLING = SamplingParams(max_new_tokens=48)
DECODER = ReFusion(num_serial_blocks=1)
DTYPES = {
    "bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64, "bf16-mixed": torch.float32
}  # fmt: skip


def _parts(**backbone: Any) -> tuple[SlotDiffusionModule, InstructionDataModule]:
    task = Additions(num_train=16, num_validation=4, num_test=6)
    data = InstructionDataModule(task, PretrainedTokenizer(source=MODEL), 4, 4)
    module = SlotDiffusionModule(
        BackboneConfig(**backbone or {"source": MODEL}), data.built_tokenizer,
        decoders={"refusion": DECODER}, sampling=SAMPLING, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01),
    )  # fmt: skip
    return module, data


def _trainer(directory: Path, precision: str) -> L.Trainer:
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(
        default_root_dir=directory, accelerator="cpu", precision=precision, logger=False, max_steps=2,
        accumulate_grad_batches=2, log_every_n_steps=1, **options,
    )  # fmt: skip


def _expected_ids(precision: str) -> list[list[int]]:
    """Decode without Lightning."""
    module, data = _parts()
    model = module.text_model().backbone.to(DTYPES[precision])
    prompts = [prompt for batch in data.test_dataloader() for prompt in batch.prompts]
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext():
        return [row.token_ids for row in decode(model, DECODER, prompts, SAMPLING, batch_size=4).rows]


@pytest.mark.parametrize("precision", DTYPES)
def test_test_and_predict_decode_in_every_precision(tmp_path: Path, precision: str) -> None:
    module, data = _parts()
    predictions = [line for batch in _trainer(tmp_path, precision).predict(module, data) for line in batch]
    assert {p.dtype for p in module.model.parameters()} == {DTYPES[precision]}
    assert [line["response_ids"] for line in predictions] == _expected_ids(precision)
    module, data = _parts()
    _trainer(tmp_path, precision).test(module, data, verbose=False)
    figures = module.evaluation.results["refusion"]
    assert figures["score"] == sum(line["score"] for line in predictions) / 6
    assert figures["score"] > 0.5, "the model answers most questions"
    assert figures["num_tokens"] == sum(line["num_tokens"] for line in predictions)


TOLERANCE = {"bf16-true": 5e-3, "16-true": 5e-3, "bf16-mixed": 1e-3}
"""Largest relative difference of a loss from float32's, five times what was found; without a name 1e-5."""


@pytest.mark.filterwarnings("ignore:trainer.precision")
@pytest.mark.parametrize("precision", DTYPES)
def test_fit_and_validation_run_in_every_precision(tmp_path: Path, precision: str) -> None:
    losses = {}
    for kind in ("32-true", precision):
        module, data = _parts(config=TINY_QWEN)
        trainer = _trainer(tmp_path, kind)
        trainer.fit(module, data)
        losses[kind] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert losses[precision].keys() == losses["32-true"].keys() >= {"train/loss", "train/ar", "val/loss", "val/mdm"}
    for name in ("train/loss", "val/loss"):
        expected = pytest.approx(losses["32-true"][name], rel=TOLERANCE.get(precision, 1e-5))
        assert losses[precision][name] == expected
    assert losses[precision]["train/num_positions"] == losses["32-true"]["train/num_positions"]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true", "bf16-mixed", "32-true"])
def test_low_precision_weights_are_warned_of_before_training(tmp_path: Path, precision: str) -> None:
    module, data = _parts()
    trainer = _trainer(tmp_path, precision)
    if precision in ("bf16-true", "16-true"):
        message = r"expected float32 weights for training with SGD, got b?float16.*bf16-mixed"
        with pytest.warns(UserWarning, match=message):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)  # any warning is an error


@pytest.mark.parametrize(
    ("precision", "has_instructions", "slow"),
    [
        ("bf16-mixed", False, "bfloat16"),
        ("bf16-mixed", True, None),
        ("16-true", True, "float16"),
        ("32-true", False, None),
    ],
)
def test_a_type_without_instructions_is_warned_of_before_training(
    tmp_path: Path, precision: str, has_instructions: bool, slow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    module, data = _parts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(tmp_path, precision).fit(module, data)
    messages = [str(warning.message) for warning in caught]
    actual = [message for message in messages if "expected 32-true on this processor" in message]
    what = f"has no instructions for {slow}, got {precision}, which takes many times as long. Set it to 32-true"
    assert len(actual) == (slow is not None)
    assert all(what in message for message in actual)


def test_optimizers_that_may_keep_master_weights_are_trusted() -> None:
    class WithMasterWeights(torch.optim.AdamW):
        """Lies outside of torch.optim."""

    weights = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    warn_of_lost_updates(WithMasterWeights(weights))
    with pytest.warns(UserWarning, match="training with AdamW, got bfloat16"):
        warn_of_lost_updates(torch.optim.AdamW(weights))
