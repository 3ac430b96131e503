"""Sharded weights: the same training as whole ones, checkpoints that load elsewhere, and nothing run from them."""

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
    "--num_threads=1", "--run_name=r",
]  # fmt: skip
SHARDED = [
    "--trainer.strategy=lightning.pytorch.strategies.ModelParallelStrategy",
    "--trainer.strategy.tensor_parallel_size=1",
]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps on two processes with sharded weights."""
    folder = tmp_path_factory.mktemp("sharded")
    two = ["--trainer.devices=2", *SHARDED, "--trainer.strategy.data_parallel_size=2"]
    torchrun("fit", *SMALL, *two, f"--runs_dir={folder}", "--run_version=fit")
    return folder / "r" / "fit" / "checkpoints" / "last.ckpt"


def test_sharded_training_gives_the_weights_of_replicated_training(sharded: Path, tmp_path: Path) -> None:
    two = ["--trainer.devices=2", "--trainer.strategy=ddp_fork"]
    assert main(["fit", *SMALL, *two, f"--runs_dir={tmp_path}", "--run_version=ddp"]) == 0
    replicated = tmp_path / "r" / "ddp" / "checkpoints" / "last.ckpt"
    weights = []
    for name, checkpoint in (("a", sharded), ("b", replicated)):
        assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / name}"]) == 0
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_sharded_checkpoint_is_tested_on_another_number_of_processes(sharded: Path, tmp_path: Path) -> None:
    args = ["test", *SMALL, f"--ckpt_path={sharded}", f"--runs_dir={tmp_path}"]
    one = ["--trainer.devices=1", *SHARDED, "--trainer.strategy.data_parallel_size=1", "--run_version=one"]
    log = tmp_path / "log"  # in a process of its own, as the strategy starts a process group
    assert wait(start([*args, *one], log)) == 0, log.read_text()
    assert main(["export", f"--ckpt_path={sharded}", f"--output={tmp_path / 'out'}"]) == 0
    exported = ["test", *SMALL, f"--ckpt_path={tmp_path / 'out'}", f"--runs_dir={tmp_path}", "--run_version=whole"]
    assert main(exported) == 0
    files = [(tmp_path / "r" / run / "predictions_refusion.jsonl").read_text() for run in ("one", "whole")]
    texts = [[line.split('"seconds"')[0] for line in file.splitlines()] for file in files]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


@pytest.mark.parametrize(("command", "file"), [("predict", "predictions"), ("test", "predictions_refusion")])
def test_two_processes_with_sharded_weights_decode_what_one_decodes(
    sharded: Path, tmp_path: Path, command: str, file: str
) -> None:
    two = ["--trainer.devices=2", *SHARDED, "--trainer.strategy.data_parallel_size=2"]
    torchrun(command, *SMALL, *two, f"--ckpt_path={sharded}", f"--runs_dir={tmp_path}", "--run_version=two")
    assert main(["export", f"--ckpt_path={sharded}", f"--output={tmp_path / 'out'}"]) == 0
    whole = [command, *SMALL, f"--ckpt_path={tmp_path / 'out'}", f"--runs_dir={tmp_path}", "--run_version=whole"]
    assert main(whole) == 0
    files = [(tmp_path / "r" / run / f"{file}.jsonl").read_text() for run in ("two", "whole")]
    texts = [[line.split('"seconds"')[0] for line in file.splitlines()] for file in files]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3
    if command == "test":
        scores = [json.loads((tmp_path / "r" / run / "results.json").read_text()) for run in ("two", "whole")]
        figures = [score["results"]["refusion"] for score in scores]
        for name in ("score", "num_prompts", "num_tokens", "num_forwards"):
            assert figures[0][name] == figures[1][name], name


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
    # An allowed module imports others, which a dotted name would reach.
    parts = [part.encode() for part in ("torch.distributed.checkpoint.metadata", "os.mkdir", f"{tmp_path}/executed")]
    module, name, argument = (b"\x8c" + bytes([len(part)]) + part for part in parts)
    (hostile / ".metadata").write_bytes(b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R.")
    with pytest.raises(ValueError, match=r"names torch.distributed.checkpoint.metadata.os.mkdir"):
        load(hostile)
    assert not (tmp_path / "executed").exists()


class _Call:
    """Is pickled as a call."""

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
