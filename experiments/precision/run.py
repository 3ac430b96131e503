"""How much of a fine-tuning survives in bfloat16 weights?

usage: python experiments/precision/run.py [--model DIRECTORY] [--num_steps N] [--output FOLDER]

Converts a masked model to ReFusion three times with the same batches, noise and AdamW: weights in float32, weights in
float32 with matrix products in bfloat16 (bf16-mixed), weights in bfloat16 (bf16-true). Writes results.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from refusion_lit import SlotDiffusionModule
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.reports.results import environment
from refusion_lit.tasks import Additions
from refusion_lit.training.optimizer import WarmupCosine

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "tests" / "goldens" / "models" / "additions-bidirectional"
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
LEARNING_RATES = (2e-5, 1e-4)  # published for the conversion of Qwen3-8B, and a larger one


def trained(model: Path, precision: Any, lr: float, num_steps: int) -> dict[str, Any]:
    """Train and return the losses, and the fraction of weights that are as they were."""
    data = InstructionDataModule(Additions(num_train=20_000), PretrainedTokenizer(source=str(model)), max_length=128)
    module = SlotDiffusionModule(
        BackboneConfig(source=str(model), attention="causal"),
        data.built_tokenizer,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=lr, weight_decay=0.0),
        schedule=WarmupCosine(warmup_steps=0, final_lr_ratio=0.0),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            default_root_dir=folder, accelerator="cpu", precision=precision, max_steps=num_steps,
            gradient_clip_val=1.0, val_check_interval=num_steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        (before,) = trainer.validate(module, data, verbose=False)
        start = {name: weight.detach().clone() for name, weight in module.model.named_parameters()}
        trainer.fit(module, data)
    same = sum(int((weight == start[name]).sum()) for name, weight in module.model.named_parameters())
    after = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    return {
        "precision": precision,
        "weights": str(next(module.model.parameters()).dtype).removeprefix("torch."),
        "learning_rate": lr,
        "val_loss_before": before["val/loss"],
        "val_loss": after["val/loss"],
        "unchanged_weights": same / sum(weight.numel() for weight in start.values()),
    }


def main() -> None:
    """Train in every precision and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=HERE)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # of the bfloat16 weights, which are the point
    torch.set_num_threads(1)
    runs = {}
    for lr in LEARNING_RATES:
        for precision in PRECISIONS:
            run = runs[f"{precision}, {lr:g}"] = trained(args.model, precision, lr, args.num_steps)
            print(json.dumps(run))
    result = {"num_steps": args.num_steps, "seed": 0, "runs": runs, "environment": environment(0, sys.argv)}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
