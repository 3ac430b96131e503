"""Commands on two processes, and a short training."""

from __future__ import annotations

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cli.conftest import QUICKSTART, TINY, pictures  # noqa: F401 - a fixture
from refusion_lit.cli import main
from support.forks import fork, wait


def torchrun(*args: str) -> None:
    """Run a command on two processes with torchrun's launcher, which forks them here where torchrun starts Python."""
    launcher = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="tests",
        start_method="fork", max_restarts=0, monitor_interval=0.05,
    )  # fmt: skip
    # In a process of its own, as the launcher sets signal handlers and environment variables.
    assert wait(fork(lambda: max(elastic_launch(launcher, main)(list(args)).values()))) == 0


@pytest.fixture(scope="session")
def fit_args(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a short training with accumulation, dropout, validation and many checkpoints."""
    overlay = tmp_path_factory.mktemp("overlay") / "often.yaml"
    overlay.write_text(
        "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint, "
        "init_args: {save_last: true, every_n_train_steps: 3}}]}"
    )
    return [
        "fit", "--config", QUICKSTART, "--config", str(overlay), *TINY, "--trainer.max_steps=40",
        "--trainer.val_check_interval=14", "--trainer.accumulate_grad_batches=2",
        "--model.backbone.config.attention_dropout=0.1", "--model.schedule.warmup_steps=5",
        "--trainer.num_sanity_val_steps=0", "--data.task.num_train=96",
    ]  # fmt: skip
