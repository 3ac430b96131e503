"""What commands say about options that they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from cli.conftest import QUICKSTART, REPOSITORY, TINY, TINY_TEST
from refusion_lit.cli import main

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
ABLATION = str(REPOSITORY / "configs" / "ablation.yaml")


FIT_ERRORS = [
    ("--model.decoders.refusion.slot_sise=4", "slot_size'?"),
    ("--model.decoders.refusion.slot_size=0", "error: model.decoders.refusion.slot_size: expected"),
    ("--model.objective.eps=7", "error: model.objective.eps: expected"),
    (
        "--model.decoders.own.class_path=ReFuson",
        "model.decoders.own.class_path: Expected a dot import path string: ReFuson; did you mean 'ReFusion'",
    ),
    ("--model.decoders.refusion.slot_threshold=1.5", "slot_threshold: expected"),
    ("--model.decoders.refusion.num_serial_blocks=9", "num_serial_blocks: expected at most 8"),
    ("--model.sampling.max_new_tokens=-1", "max_new_tokens: expected"),
    ("--model.objective=Hybird", "did you mean 'Hybrid'"),
    ("--trainer.max_stepz=3", "max_steps"),
    ("--data.task=Hybrid", "choose one of Additions, "),
    ("--data.task=none.Task", "No module named 'none'"),
    ("--data.task=json.JSONDecoder", "data.task: Import path json.JSONDecoder"),
    ("--model.optimizer=Adamm", "did you mean 'Adam'?"),
    ("--model.decoders.refusion.slot_size=x", "model.decoders.refusion.slot_size: expected int. Got value: x"),
    ("--model.backbone.attention=up", "model.backbone.attention: expected "),
    ("--num_threads=0", "num_threads: expected an integer of at least 1, got 0"),
    ("--trainer.val_check_interval=x", "trainer: Invalid time format"),
    (
        "--model.backbone.config.model_type=qwen33",
        "model_type: expected one that transformers knows, got 'qwen33'; did you mean 'qwen3'?",
    ),
]
"""Options of ``fit`` with the quickstart's config, and what is said about them."""
GENERATE_ERRORS = [
    ("--prompt=2", "prompt: expected the option once, got '2 times'"),
    ("--resume", "resume: expected --output, the file of"),
    ("--stop=[2, 3]", "got '[2, 3]'; quote numbers and signs, as"),
    ("--stop=[;, =]", "got '[;, =]'; quote numbers and signs, as"),
    ("--max_new_tokens=100000", "context of "),
    ("--decoder.slot_sise=2", "slot_size'?"),
]
"""Options of ``generate`` with a model and a prompt, and what is said about them."""
OTHER_ERRORS = [
    (["fitt"], "did you mean 'fit'"),
    (
        ["fit", "--config", QUICKSTART, "--model.decoders.o.class_path=LLaDA", "--model.decoders.o.slot_size=4"],
        "model.decoders.o.slot_size: unknown option 'slot_size'",
    ),
    (["fit", "--resume"], "resume: expected a run's directory, or --config FILE, got 'neither'"),
    (["fit", "--config", "missing.yaml"], "missing.yaml"),
    (["fit", "--config", ABLATION], "backbone: expected a source (directory or hub id) or a config with model_type"),
    (["fit"], "required: data.task"),
    (["fit", "quickstart.yaml"], "quickstart.yaml"),
    (
        [
            "fit",
            "--config",
            str(REPOSITORY / "configs" / "policy.yaml"),
            "--model.objective.rewards=[refusion_lit.contrib.rl.Reward]",
        ],
        "model.objective: rewards: ",
    ),
    (
        ["fit", "--model.objective=refusion_lit.learning.objective.Objective"],
        "model.objective: Expected an instantiatable class",
    ),
    (["fit", "--model.optimizer.lr=0.05"], "model.optimizer.lr: unknown option 'lr' of Optimizer"),
    (["fit", "--model.optimizer={name: SGD, lr: 0.05}"], "write {class_path: NAME, init_args: "),
    (["fit", "--model.lr_scheduler={T_max: 3}"], "write {class_path: NAME, init_args: "),
    (["fit", "--model.decoders={a: {slot_size: 3}}"], "write {class_path: NAME, init_args: "),
    (["fit", "--model.decoders.a.slot_size=3"], "write {class_path: NAME, init_args: "),
    (["fit", "--model.decoders=ReFusion"], "model.decoders: expected dict"),
    (["fit", "--trainer.logger=[{save_dir: x}]"], "choose one of CSVLogger, "),
    (["fit", "--trainer.callbacks=[{class_path: EarlyStopping, monitor: a}]"], "write {class_path: NAME, init_args: "),
    (["fit", "--data.tokenizer.source=x"], "choose one of CharacterTokenizer, "),
    (["fit", "--model.objective.pad_responses_to=64"], "unknown option 'pad_responses_to' of Hybrid"),
    (["sweep"], "required: config"),
    (["test", "--config", QUICKSTART, "--ckpt_path=missing.ckpt"], "missing.ckpt"),
    (["test", "--config", ABLATION], "ckpt_path: expected a checkpoint, a Hugging Face directory or a hub id to test"),
    (["test", "--config", QUICKSTART, "--ckpt_path=some/one"], "error: ckpt_path: expected a directory or a hub"),
    (["generate", f"--ckpt_path={MODEL}", "--prompt=1", "--stop=;", "--stop=,"], "stop: expected the option once, got"),
    (["generate", f"--ckpt_path={MODEL}", "--prompt", "-5"], "no token for '-' (in '-5'). Leave it out"),
    (["generate", f"--ckpt_path={MODEL}", "--prompt", "--seed=1"], "prompt: expected one argument"),
    (["generate", "--ckpt_path=", "--prompt=1"], "ckpt_path: expected a checkpoint, a Hugging Face directory or a"),
    (["generate", f"--ckpt_path={MODEL}", "--verifier=no/ne", "--prompt=1"], "error: verifier: expected a"),
    (["generate", "--ckpt_path=x.ckpt", "--prompt=1", "--decoder=ReFuson"], "did you mean 'ReFusion'"),
    (["generate", "--ckpt_path=missing.ckpt", "--prompt=1"], "missing.ckpt"),
    (["generate", "--ckpt_path=x.ckpt"], "exactly one of --prompt and --prompts"),
    (["generate", "--ckpt_path=x.ckpt", "--prompt="], "empty prompt"),
    (["generate", "--ckpt_path=x.ckpt", "--prompt=1", "--output="], "output: expected a file's name, got ''"),
    (["generate"], "required: ckpt_path"),
    (["generate", "--ckpt_path=x.ckpt", "--prompt=1", "--decoder=./mine/one_shot.py"], "./mine/one_shot.py"),
    (["generate", "--ckpt_path=x", "--prompt=1", "--decoder=no.yaml"], "decoder: "),
    (["generate", "--ckpt_path=x", "--prompt=1", "--dtype=fp32"], "dtype: expected "),
    (["export", f"--ckpt_path={MODEL}", "--output=new", "--results=no"], "results: expected the directory"),
    (
        ["serve", f"--ckpt_path={MODEL}", "--max_new_tokens=600"],
        "max_new_tokens: expected less than the model's context of 512 tokens, got 600; lower it",
    ),
]
"""Further command lines, and what is said about them."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *((["fit", "--config", QUICKSTART, option], expected) for option, expected in FIT_ERRORS),
        *(
            (["generate", f"--ckpt_path={MODEL}", "--prompt=1", option], expected)
            for option, expected in GENERATE_ERRORS
        ),
        *OTHER_ERRORS,
    ],
)
def test_errors_are_one_line_with_the_fix(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert len([line for line in error.splitlines() if line.startswith("refusion-lit: error:")]) == 1
    assert "Traceback" not in error


def test_a_file_of_options_without_a_class_is_answered_with_the_class_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decoder.yaml").write_text("slot_size: 4\n")
    assert main(["generate", "--ckpt_path=x", "--prompt=1", f"--decoder={tmp_path / 'decoder.yaml'}"]) == 2
    error = capsys.readouterr().err
    assert "decoder: " in error
    assert "write {class_path: NAME, init_args: " in error


def test_a_run_directory_stands_for_its_last_checkpoint_which_is_named(
    trained: Path, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = (
        ["generate", "--prompt=1+2>"],
        ["export", f"--output={tmp_path / 'exported'}"],
        ["test", "--config", QUICKSTART, *TINY_TEST, f"--runs_dir={tmp_path}"],
    )
    for command in commands:
        assert main([*command, f"--ckpt_path={trained}"]) == 0
        assert f"checkpoint: {checkpoint}\n" in capsys.readouterr().err
    (run,) = tmp_path.rglob("version_*")
    assert (run / "results.json").is_file()
    assert not list(run.rglob("hparams.yaml"))
    assert not list(trained.rglob("hparams.yaml"))


def test_a_directory_of_other_checkpoints_is_no_model_but_the_newest_is_named(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(checkpoint, tmp_path / "step=4.ckpt")
    for command in (["generate", "--prompt=1"], ["test", "--config", QUICKSTART, f"--runs_dir={tmp_path / 'runs'}"]):
        assert main([*command, f"--ckpt_path={tmp_path}"]) == 2
        assert str(tmp_path / "step=4.ckpt") in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_revision_of_what_is_on_this_machine_is_refused(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (MODEL, checkpoint):
        assert main(["generate", "--prompt=1", f"--ckpt_path={source}", "--revision=main"]) == 2
        assert "revision: expected none for what is on this machine, got 'main'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model.backbone.source="], "backbone.source: expected a directory or a hub id, got ''"),
        (
            [
                "--data.tokenizer=PretrainedTokenizer",
                f"--data.tokenizer.source={MODEL}",
                "--data.tokenizer.revision=v1",
            ],
            "tokenizer.revision: expected none for what is on this machine, got 'v1'",
        ),
        (
            ["--model.decoding.verifier=no/ne"],
            "model.decoding.verifier: expected a decoder that uses a verifier",
        ),
    ],
)
def test_what_would_be_ignored_or_read_elsewhere_is_refused(
    options: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}", *options]) == 2
    assert expected in capsys.readouterr().err
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_an_empty_folder_is_told_what_a_model_directory_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt=1", f"--ckpt_path={tmp_path}"]) == 2
    assert "config.json, tokenizer.json and weights" in capsys.readouterr().err


def test_a_test_without_examples_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={MODEL}", f"--runs_dir={tmp_path}"]
    assert main([*command, "--data.task.num_test=0"]) == 2
    assert "data.task: expected examples in the test split, got 0" in capsys.readouterr().err
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.parametrize(("num_rows", "fraction"), [(4, 0), (1, 0.999)])  # the only row is trained
def test_a_file_too_short_to_hold_out_of_names_what_to_set(
    num_rows: int, fraction: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"query": f"{number}+1", "response": str(number + 1)} for number in range(num_rows)]
    (tmp_path / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = ["--data.task=InstructionFiles", f"--data.task.train={tmp_path / 'four.jsonl'}"]
    task += [f"--data.task.validation_fraction={fraction}", "--data.tokenizer.characters=+0123456789"]
    command = ["fit", "--config", QUICKSTART, *task, "--data.batch_size=1"]
    assert main([*command, f"--runs_dir={tmp_path / 'runs'}"]) == 2
    error = capsys.readouterr().err
    assert "validation split, got 0" in error
    assert "validation_fraction" in error


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "mps", "tpu"])
def test_a_missing_accelerator_is_named(
    accelerator: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    assert main(["fit", "--config", QUICKSTART, f"--trainer.accelerator={accelerator}"]) == 2
    message = f"trainer.accelerator: expected a device that this machine has, got '{accelerator}'"
    assert message in capsys.readouterr().err


def test_a_refused_resume_leaves_the_losses_where_they_are(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "name" / "version_0"
    shutil.copytree(trained, run)
    losses = (run / "metrics.csv").read_text()
    assert main(["fit", f"--resume={run}", "--trainer.max_steps=8", "--data.max_length=2"]) == 2
    assert "data.max_length: expected" in capsys.readouterr().err
    assert (run / "metrics.csv").read_text() == losses
    assert not list(run.glob("metrics_before_*"))


def test_a_file_that_is_no_checkpoint_is_not_called_dangerous(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.ckpt"
    path.write_bytes(b"x")
    assert main(["generate", f"--ckpt_path={path}", "--prompt=1"]) == 2
    error = capsys.readouterr().err
    assert "not what torch.save writes" in error
    assert error.endswith("check the path, or give another.\n")
