"""Training with sharded weights equals training with whole weights. Checkpoints load on any number of processes.

Code in a checkpoint is not run.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from cli.conftest import QUICKSTART
from refusion_lit import load
from refusion_lit.checkpoints.files import find_newest, read_checkpoint
from refusion_lit.checkpoints.sharded import check_index
from refusion_lit.cli import main
from robustness.conftest import torchrun
from support.forks import start, wait

SMALL = [
    "--config", QUICKSTART, "--trainer.max_steps=3", "--trainer.val_check_interval=3", "--data.batch_size=4",
    "--data.task.num_train=64", "--data.task.num_validation=3", "--data.task.num_test=3",
    "--model.schedule.warmup_steps=1", "--model.backbone.config.hidden_size=16",
    "--model.backbone.config.num_hidden_layers=2", "--trainer.enable_progress_bar=false",
    "--num_threads=1", "--run_name=r", "--model.sampling.max_new_tokens=32",
]  # fmt: skip
SHARDED = [
    "--trainer.strategy=lightning.pytorch.strategies.ModelParallelStrategy",
    "--trainer.strategy.tensor_parallel_size=1",
]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of three steps on two processes with sharded weights."""
    folder = tmp_path_factory.mktemp("sharded")
    two = ["--trainer.devices=2", *SHARDED, "--trainer.strategy.data_parallel_size=2"]
    torchrun("fit", *SMALL, *two, f"--runs_dir={folder}", "--run_version=fit")
    return folder / "r" / "fit" / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def exported(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint as a model with whole weights."""
    output = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", f"--ckpt_path={sharded}", f"--output={output}"]) == 0
    return output


@pytest.fixture(scope="module")
def tested(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a ``test`` of the exported model on one process."""
    folder = tmp_path_factory.mktemp("tested")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("refusion_lit.reports.plots._save", lambda *_: b"<svg/>")  # drawing is slow
        assert main(["test", *SMALL, f"--ckpt_path={exported}", f"--runs_dir={folder}", "--run_version=v"]) == 0
    return folder / "r" / "v"


def _read_predictions(path: Path) -> list[str]:
    """Return the lines of three predictions without their times."""
    lines = [line.split('"seconds"')[0] for line in path.read_text().splitlines()]
    assert len(lines) == 3
    return lines


def test_sharded_training_gives_the_weights_of_replicated_training(exported: Path, tmp_path: Path) -> None:
    two = ["--trainer.devices=2", "--trainer.strategy=ddp_fork"]
    assert main(["fit", *SMALL, *two, f"--runs_dir={tmp_path}", "--run_version=ddp"]) == 0
    checkpoint = tmp_path / "r" / "ddp" / "checkpoints" / "last.ckpt"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'replicated'}"]) == 0
    sharded, replicated = (load_file(path / "model.safetensors") for path in (exported, tmp_path / "replicated"))
    assert sharded.keys() == replicated.keys()
    for name, tensor in sharded.items():
        torch.testing.assert_close(tensor, replicated[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_sharded_checkpoint_is_tested_on_another_number_of_processes(
    sharded: Path, tested: Path, tmp_path: Path
) -> None:
    """Two processes wrote the checkpoint; one process with sharded weights reads it."""
    args = ["test", *SMALL, f"--ckpt_path={sharded}", f"--runs_dir={tmp_path}", "--run_version=one"]
    one = ["--trainer.devices=1", *SHARDED, "--trainer.strategy.data_parallel_size=1"]
    log = tmp_path / "log"  # in a process of its own, as the strategy starts a process group
    assert wait(start([*args, *one], log)) == 0, log.read_text()
    name = "predictions_refusion.jsonl"
    assert _read_predictions(tmp_path / "r" / "one" / name) == _read_predictions(tested / name)


@pytest.mark.parametrize("command", ["predict", "test"])
def test_two_processes_with_sharded_weights_decode_what_one_decodes(
    sharded: Path, exported: Path, tested: Path, tmp_path: Path, command: str
) -> None:
    two = ["--trainer.devices=2", *SHARDED, "--trainer.strategy.data_parallel_size=2"]
    torchrun(command, *SMALL, *two, f"--ckpt_path={sharded}", f"--runs_dir={tmp_path}", "--run_version=two")
    run = tmp_path / "r" / "two"
    if command == "predict":
        args = ["predict", *SMALL, f"--ckpt_path={exported}", f"--runs_dir={tmp_path}", "--run_version=whole"]
        assert main(args) == 0
        name = "predictions.jsonl"
        assert _read_predictions(run / name) == _read_predictions(tmp_path / "r" / "whole" / name)
        return
    name = "predictions_refusion.jsonl"
    assert _read_predictions(run / name) == _read_predictions(tested / name)
    figures, expected = (
        json.loads((path / "results.json").read_text())["results"]["refusion"] for path in (run, tested)
    )
    for name in ("score", "num_prompts", "num_tokens", "num_forwards"):
        assert figures[name] == expected[name], name


def test_the_wrong_strategy_is_refused_with_a_way_out(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["test", *SMALL, f"--ckpt_path={sharded}", f"--runs_dir={tmp_path}"]) == 2
    assert "ModelParallelStrategy for a sharded checkpoint, got" in capsys.readouterr().err


def test_a_torn_or_hostile_checkpoint_is_refused(sharded: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.ckpt"
    shutil.copytree(sharded, torn)
    (torn / "meta.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks meta\.pt"):
        read_checkpoint(torn)
    (torn / "meta.pt").write_bytes((sharded / "meta.pt").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"^ckpt_path: .*torn\.ckpt.* cannot be read"):
        read_checkpoint(torn)
    assert find_newest([tmp_path], resumable=True)[0] is None

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    hostile = tmp_path / "hostile.ckpt"
    shutil.copytree(sharded, hostile)
    (hostile / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match=r"^ckpt_path: .*\.metadata cannot be read"):
        load(hostile)
    # Unpickling may read the module torch.distributed.checkpoint.metadata. The dotted name "os.mkdir" leads out of it.
    texts = ("torch.distributed.checkpoint.metadata", "os.mkdir", f"{tmp_path}/executed")
    module, name, argument = (pickle.SHORT_BINUNICODE + bytes([len(text.encode())]) + text.encode() for text in texts)
    call = module + name + pickle.STACK_GLOBAL + argument + pickle.TUPLE1 + pickle.REDUCE
    (hostile / ".metadata").write_bytes(pickle.PROTO + bytes([4]) + call + pickle.STOP)
    with pytest.raises(ValueError, match=r"names torch.distributed.checkpoint.metadata.os.mkdir"):
        load(hostile)
    assert not (tmp_path / "executed").exists()


class _Call:
    """An object that unpickling replaces by the result of a call."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.parts[0], self.parts[1:]


def test_an_index_may_read_members_of_enumerations_alone(tmp_path: Path) -> None:
    index = tmp_path / ".metadata"
    names = [member.name for member in _MEM_FORMAT_ENCODING]
    index.write_bytes(pickle.dumps(_Call(getattr, _MEM_FORMAT_ENCODING, names[0])))  # as Python 3.11.2 writes it
    check_index(index)
    for owner, name in ((_MEM_FORMAT_ENCODING, "__reduce__"), (OrderedDict, "popitem")):
        index.write_bytes(pickle.dumps(_Call(getattr, owner, name)))
        with pytest.raises(ValueError, match=r"^ckpt_path: .*\.metadata cannot be read"):
            check_index(index)
