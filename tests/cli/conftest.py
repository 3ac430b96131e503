"""A tiny trained run, made once by the command line itself."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401 - its log handler keeps the standard error of its import
import pytest

from refusion_lit.cli import main
from support import drafter_runs

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
TINY = [
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--model.backbone.config.hidden_size=16",
    "--model.backbone.config.intermediate_size=32",
    "--model.backbone.config.num_hidden_layers=1",
    "--model.sampling.max_new_tokens=16",
    "--data.task.num_train=64",
    "--data.task.num_validation=16",
    "--data.task.num_test=12",
    "--data.batch_size=8",
    "--num_threads=1",
]
"""Options of a tiny training."""
TINY_TEST = [option for option in TINY if "trainer." not in option and "backbone" not in option]
"""Those of them that ``test`` and ``predict`` take, whose model comes from a checkpoint."""

KEYS = ["id", "prompt", "response", "response_ids", "reference", "score", "decoder", "num_tokens",
        "num_forwards", "finish_reason", "seconds"]  # fmt: skip
"""Keys of a prediction, as ``docs/commands.md`` documents them."""


def build_cli(*args: str) -> Any:
    """Build trainer, model and data of ``fit`` from a command line, without a run directory and without training."""
    from refusion_lit.cli.lightning import RefusionCLI

    class IdleCLI(RefusionCLI):
        claim = None  # the base class keeps the directory of an earlier run

        def _choose_directory(self, config: object) -> None: ...

        def _run_subcommand(self, subcommand: str) -> None: ...

    return IdleCLI(["fit", *args])


@pytest.fixture
def small_disk() -> Iterator[Callable[[int | None], None]]:
    """Return a function that lets writes beyond a size in bytes fail in every file; ``None`` ends that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of ``fit`` on a tiny model."""
    runs = tmp_path_factory.mktemp("runs")
    assert main(["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={runs}"]) == 0
    return runs / "quickstart" / "version_0"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with next-token predictions."""
    folder = tmp_path_factory.mktemp("base")
    config = drafter_runs.write_config(
        folder / "fit.yaml",
        {"class_path": "Autoregressive"},
        drafter_runs.NUM_STEPS,
        source=str(drafter_runs.ADDITIONS),
    )
    checkpoint = drafter_runs.train(folder, config) / "checkpoints" / "last.ckpt"
    assert main(["export", "--ckpt_path", str(checkpoint), "--output", str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture(scope="session")
def checkpoint(trained: Path) -> str:
    """Return the run's last checkpoint."""
    path = trained / "checkpoints" / "last.ckpt"
    assert path.is_file()
    return str(path)


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plots of reports empty, because drawing takes half the time of a short ``test``.

    ``test_report.py``, which overrides this fixture, and ``tests/reports`` draw them.
    """
    monkeypatch.setattr("refusion_lit.reports.plots._save", lambda *_: b"<svg/>")
