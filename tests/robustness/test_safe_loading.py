"""Nothing that a checkpoint or a directory brings along is run, whichever way it is loaded."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from lightning.pytorch.plugins.io import TorchCheckpointIO
from transformers import AutoTokenizer

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY, build_cli
from refusion_lit.cli import main
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.training.callbacks import AtomicCheckpointIO

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"


class RunsCode:
    """An object whose unpickling makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def malicious(tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint that would leave a trace, and the trace."""
    trace = tmp_path / "ran"
    path = tmp_path / "malicious.ckpt"
    torch.save({"state_dict": {}, "refusion_lit": {"architecture": "{}", "traits": RunsCode(trace)}}, path)
    return path, trace


def test_the_trap_works(malicious: tuple[Path, Path]) -> None:
    path, trace = malicious
    torch.load(path, weights_only=False)
    assert trace.is_dir()


@pytest.mark.parametrize("weights_only", [None, False, True])
def test_lightning_loads_data_only_for_any_option(malicious: tuple[Path, Path], weights_only: bool | None) -> None:
    path, trace = malicious
    with pytest.raises(ValueError, match="could run code"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    assert not trace.exists()


def test_the_command_line_installs_the_safe_reader_unless_another_is_chosen() -> None:
    args = ["--config", QUICKSTART, *TINY]
    chosen = "--trainer.plugins=lightning.pytorch.plugins.io.TorchCheckpointIO"
    for options, expected in (([], AtomicCheckpointIO), ([chosen], TorchCheckpointIO)):
        assert type(build_cli(*args, *options).trainer.strategy.checkpoint_io) is expected


@pytest.mark.parametrize("command", ["fit", "test", "export", "generate", "python"])
def test_no_command_runs_code_of_a_checkpoint(
    malicious: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path, trace = malicious
    options = {
        "fit": ["--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}"],
        "test": ["--config", QUICKSTART, f"--runs_dir={tmp_path}"],
        "export": [f"--output={tmp_path / 'out'}"],
        "generate": ["--prompt=12+34>"],
    }
    if command == "python":
        with pytest.raises(ValueError, match="could run code"):
            refusion_lit.load(path)
    else:
        assert main([command, *options[command], f"--ckpt_path={path}"]) == 2
        assert "could run code" in capsys.readouterr().err
    assert not trace.exists()


def test_trusting_code_is_off_and_says_what_it_means() -> None:
    assert BackboneConfig(source="x").trust_remote_code is False
    assert PretrainedTokenizer(source="x").trust_remote_code is False
    with pytest.warns(UserWarning, match="^trust_remote_code: Python code "):
        tokenizer = PretrainedTokenizer(source=str(MODEL), trust_remote_code=True).build(None)
    with pytest.warns(UserWarning, match="^trust_remote_code: .*rights"):
        BackboneConfig(source=str(MODEL), trust_remote_code=True).build(tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BackboneConfig(source=str(MODEL)).build(tokenizer)


def test_a_command_tells_once_that_code_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="^trust_remote_code: ") as message:
        assert (
            main(["generate", f"--ckpt_path={MODEL}", "--prompt=1", "--max_new_tokens=1", "--trust_remote_code"]) == 0
        )
    assert len({str(warning.message) for warning in message if "trust_remote_code" in str(warning.message)}) == 1
    assert "trust_remote_code" not in capsys.readouterr().err


ARCHITECTURE_IN_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

open({trace!r}, "w").close()


class TinyConfig(Qwen3Config):
    model_type = "tiny_of_the_tests"


class TinyForCausalLM(Qwen3ForCausalLM):
    config_class = TinyConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Yield a directory whose architecture is Python code of its own, and the trace that running it leaves."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", [*sys.path, modules])
    questions: list[str] = []

    def refuse(question: str = "") -> str:
        questions.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", refuse)
    directory, trace = tmp_path / "directory", tmp_path / "ran"
    BackboneConfig(source=str(MODEL)).build(AutoTokenizer.from_pretrained(MODEL)).model.save_pretrained(directory)
    code = {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.TinyForCausalLM"}
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "tiny_of_the_tests", "auto_map": code}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tiny.py").write_text(ARCHITECTURE_IN_CODE.format(trace=str(trace)))
    yield directory, trace
    assert questions == [], "a prompt on standard input"


def test_code_of_a_directory_runs_only_if_trusted_and_never_prompts(with_code: tuple[Path, Path]) -> None:
    directory, trace = with_code
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = BackboneConfig(source=str(directory))
    with pytest.raises(ValueError, match=r"^backbone\.source: .*in Python code.*Set trust_remote_code: true"):
        config.build(tokenizer)
    assert not trace.exists()
    with pytest.warns(UserWarning, match="^trust_remote_code: "):
        backbone = replace(config, trust_remote_code=True).build(tokenizer)
    assert trace.exists()
    assert type(backbone.model).__name__ == "TinyForCausalLM"


def test_a_stored_tokenizer_never_prompts_for_trust(with_code: tuple[Path, Path]) -> None:
    files = tokenizer_files(AutoTokenizer.from_pretrained(MODEL))
    config = json.loads(files["tokenizer_config.json"])
    code = {"auto_map": {"AutoTokenizer": [None, "tiny.TinyTokenizer"]}, "tokenizer_class": "TinyTokenizer"}
    files["tokenizer_config.json"] = json.dumps(config | code)
    with pytest.raises(ValueError, match="tokenizer files in the checkpoint"):
        tokenizer_from_files(files)
    assert not with_code[1].exists()
