"""Configs and runs of short trainings of drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from refusion_lit.cli import main

ADDITIONS = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
NUM_STEPS = 40
"""Steps after which a model predicts some sums, and a drafter some tokens."""
QUERIES = ["12+34,56+78>", "1+2,3+4>", "90+9,11+22>"]


def write_config(path: Path, objective: dict[str, Any], max_steps: int, **backbone: Any) -> str:
    """Write the config of a short training."""
    values = {
        "run_name": "short",
        "trainer": {
            "accelerator": "cpu", "max_steps": max_steps, "limit_val_batches": 1, "val_check_interval": 20,
            "log_every_n_steps": 1, "enable_progress_bar": False,
            "callbacks": [{
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"save_last": True, "every_n_train_steps": 20, "save_top_k": -1},
            }],
        },
        "model": {
            "backbone": backbone,
            "objective": objective,
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
            "schedule": {"warmup_steps": 1},
        },
        "data": {
            "task": {"class_path": "Additions", "init_args": {"num_train": 640, "num_validation": 8, "num_test": 3}},
            "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"source": str(ADDITIONS)}},
            "batch_size": 8, "max_length": 128,
        },
    }  # fmt: skip
    path.write_text(yaml.safe_dump(values))
    return str(path)


def train(folder: Path, config: str) -> Path:
    """Run ``fit``; return the run's directory."""
    assert main(["fit", "--config", config, "--num_threads=1", f"--runs_dir={folder}", "--run_version=fit"]) == 0
    return folder / "short" / "fit"
