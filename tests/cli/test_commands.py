"""The promised commands, from fit to text, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import refusion_lit
from cli.conftest import KEYS, QUICKSTART, REPOSITORY, TINY, TINY_TEST
from refusion_lit.checkpoints.metadata import METADATA_KEY
from refusion_lit.cli import main
from refusion_lit.cli.lightning import _use_source, parse_only
from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.saving import save_model
from refusion_lit.text_model import TextModel
from support.forks import fork, wait

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
ABLATION = str(REPOSITORY / "configs" / "ablation.yaml")


def test_fit_leaves_config_environment_metrics_and_checkpoint(trained: Path, checkpoint: str) -> None:
    assert (trained / "config.yaml").is_file()
    environment = json.loads((trained / "environment.json").read_text())
    assert environment["seed"] == 0
    assert environment["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"git", "hardware", "command"} <= environment.keys()
    metrics = (trained / "metrics.csv").read_text()
    header = metrics.splitlines()[0].split(",")
    assert {"train/loss", "train/ar", "train/mdm", "val/loss", "val/ar", "val/mdm", "train/gradient_norm"} <= set(
        header
    )
    assert any(name.startswith("lr-") for name in header)
    stored = torch.load(checkpoint, weights_only=True)
    assert "hyper_parameters" not in stored


def test_test_prints_the_table_and_writes_results(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*args, "--trainer.enable_progress_bar=false"]) == 0
    assert "tokens/forward" in capsys.readouterr().out
    run = tmp_path / "quickstart" / "version_0"
    figures = json.loads((run / "results.json").read_text())["results"]["refusion"]
    lines = [json.loads(line) for line in (run / "predictions_refusion.jsonl").read_text().splitlines()]
    assert figures["num_prompts"] == len(lines) == 12  # num_test in TINY
    assert len({line["id"] for line in lines}) == 12
    tokens, forwards = (sum(line[key] for line in lines) for key in ("num_tokens", "num_forwards"))
    assert (figures["num_tokens"], figures["num_forwards"]) == (tokens, forwards)
    assert figures["tokens_per_forward"] == pytest.approx(tokens / forwards)
    assert figures["score"] == pytest.approx(sum(line["score"] for line in lines) / 12)


@pytest.mark.parametrize("source", ["checkpoint", "directory"])
def test_a_checkpoint_or_a_directory_brings_the_model(
    checkpoint: str, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint if source == "checkpoint" else MODEL
    config = {"model": {"backbone": {"gradient_checkpointing": True}}}  # an option of trainings, which changes nothing
    (tmp_path / "overlay.yaml").write_text(json.dumps(config))
    args = ["test", "--config", ABLATION, "--config", str(tmp_path / "overlay.yaml"), f"--ckpt_path={path}"]
    args += ["--model.decoders={ar: {class_path: ReFusion, init_args: {slot_size: 8, num_serial_blocks: 1}}}"]
    args += ["--data.task.num_test=2", "--model.sampling.max_new_tokens=48", "--trainer.enable_progress_bar=false"]
    assert main([*args, f"--runs_dir={tmp_path}", "--num_threads=1"]) == 0
    run = tmp_path / "ablation" / "version_0"
    lines = [json.loads(line) for line in (run / "predictions_ar.jsonl").read_text().splitlines()]
    model = refusion_lit.load(path)
    decoder = ReFusion(slot_size=8, num_serial_blocks=1)
    ids = [line["id"] for line in lines]
    answers = model.generate([line["prompt"] for line in lines], decoder=decoder, max_new_tokens=48, ids=ids)
    assert [line["response_ids"] for line in lines] == [answer.token_ids for answer in answers]
    assert "ar (ReFusion)" in capsys.readouterr().out, "a name that does not say its class"


def test_a_directorys_tokenizer_is_read_as_its_weights_are() -> None:
    cli = parse_only("test")
    read_as = ["--model.backbone.revision=v1.0", "--model.backbone.checkpoint_format=sdar"]
    config = cli.parse(["test", "--config", QUICKSTART, *read_as]).test
    _use_source(config, str(MODEL))
    options = config.data.tokenizer.init_args
    assert (options.source, options.revision, options.checkpoint_format) == (str(MODEL), "v1.0", "sdar")


@pytest.mark.parametrize("given", [None, "{query},", "{query}"])
@pytest.mark.parametrize("source", ["checkpoint", "directory"])
def test_prompts_are_made_with_the_models_template_unless_another_is_given(
    checkpoint: str, source: str, given: str | None, tmp_path: Path
) -> None:
    path = tmp_path / ("model.ckpt" if source == "checkpoint" else "model")
    if source == "checkpoint":
        content = torch.load(checkpoint, weights_only=True)
        content[METADATA_KEY]["prompt_template"] = "{query}>"
        torch.save(content, path)
    else:
        model = refusion_lit.load(MODEL)
        save_model(model.backbone, model.tokenizer, path, prompt_template="{query}>")
    cli = parse_only("test")
    options = [] if given is None else [f"--data.prompt_template={given}"]
    config = cli.parse(["test", "--config", QUICKSTART, *options]).test
    _use_source(config, str(path))
    assert config.data.prompt_template == (given or "{query}>")


def test_random_weights_are_announced(tmp_path: Path) -> None:
    args = ["validate", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}", "--model.schedule.warmup_steps=1"]
    with pytest.warns(UserWarning, match="ckpt_path: none given, .*random weights"):
        assert main([option for option in args if "max_steps" not in option]) == 0


def test_batch_size_changes_no_prediction(checkpoint: str, tmp_path: Path) -> None:
    texts = []
    for size in (1, 5):
        args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
        args += [
            f"--model.decoding.batch_size={size}",
            f"--run_version=b{size}",
            "--trainer.enable_progress_bar=false",
        ]
        assert main(args) == 0
        lines = (tmp_path / "quickstart" / f"b{size}" / "predictions_refusion.jsonl").read_text().splitlines()
        values = [json.loads(line) for line in lines]
        texts.append([(v["id"], v["response_ids"], v["num_forwards"]) for v in values])
    assert texts[0] == texts[1]


def test_predict_writes_exactly_the_documented_keys(checkpoint: str, tmp_path: Path) -> None:
    args = ["predict", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*args, "--trainer.enable_progress_bar=false"]) == 0
    lines = (tmp_path / "quickstart" / "version_0" / "predictions.jsonl").read_text().splitlines()
    assert all(list(json.loads(line)) == KEYS for line in lines)


def test_what_a_checkpoint_stores_never_overrides_options(checkpoint: str, tmp_path: Path) -> None:
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    args += [
        "--model.sampling.max_new_tokens=7",
        "--model.decoders.refusion.slot_size=7",
        "--trainer.enable_progress_bar=false",
    ]
    assert main([*args, "--model.decoders.refusion.num_serial_blocks=1", "--model.seed=3"]) == 0
    run = tmp_path / "quickstart" / "version_0"
    results = json.loads((run / "results.json").read_text())
    assert results["decoders"]["refusion"]["slot_size"] == 7
    lines = [json.loads(line) for line in (run / "predictions_refusion.jsonl").read_text().splitlines()]
    assert max(line["num_tokens"] for line in lines) <= 7


def test_any_optimizer_and_schedule_by_class_path(tmp_path: Path) -> None:
    args = ["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}", "--model.optimizer=torch.optim.SGD"]
    args += ["--model.optimizer.lr=0.25", "--model.lr_scheduler=torch.optim.lr_scheduler.ConstantLR"]
    assert main([*args, "--model.lr_scheduler.factor=0.5"]) == 0
    header, *rows = (tmp_path / "quickstart" / "version_0" / "metrics.csv").read_text().splitlines()
    column = next(i for i, name in enumerate(header.split(",")) if name.startswith("lr-SGD"))
    assert {row.split(",")[column] for row in rows} - {""} == {"0.125"}


@pytest.mark.parametrize("args", [["--help"], ["fit", "--help"], ["generate", "--help"]])
def test_a_reader_that_leaves_early_ends_a_command_silently(args: list[str], tmp_path: Path) -> None:
    def work() -> int:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - it ends with the process
        os.dup2(os.open(tmp_path / "error", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv[1:] = args
        code = main()
        sys.stderr.flush()
        os._exit(code)  # the interpreter's flush at exit is tested with a fresh process below

    assert wait(fork(work)) in (0, 141)  # argparse ignores the closed pipe
    assert (tmp_path / "error").read_text() == ""


def test_a_process_whose_reader_leaves_early_ends_silently() -> None:
    command = [sys.executable, "-m", "refusion_lit.cli", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_full_disk_at_standard_output_is_named() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "refusion_lit.cli", "--help"], stdout=full, stderr=subprocess.PIPE,
                              check=False)  # fmt: skip
    message = b"refusion-lit: error: standard output or a log file: No space left on device\n"
    assert (done.returncode, done.stderr.startswith(message)) == (2, True)


def test_a_closed_standard_output_is_no_error() -> None:
    command = 'exec "$0" -m refusion_lit.cli report --help >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_standard_input_has_no_prompts(tmp_path: Path) -> None:
    def work() -> int:
        sys.stdin = None  # as Python sets it for a closed stream  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout = sys.stderr = (tmp_path / "log").open("w", buffering=1)
        sys.argv[1:] = ["generate", "--ckpt_path", str(MODEL), "--prompts", "-"]
        return main()

    assert wait(fork(work)) == 2
    assert "prompts: expected at least one prompt" in (tmp_path / "log").read_text()


def test_what_the_terminals_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "refusion_lit.cli", "init", "läufe"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"configs in l\\xe4ufe/configs\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"refusion-lit {refusion_lit.__version__}"


def test_init_copies_the_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "configs" / "quickstart.yaml").read_text() == Path(QUICKSTART).read_text()
    assert main(["init", str(tmp_path)]) == 0  # what is there is kept
    (tmp_path / "configs" / "quickstart.yaml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "configs/quickstart.yaml, which was changed" in capsys.readouterr().err
    assert (tmp_path / "configs" / "quickstart.yaml").read_text() == "mine"


@pytest.mark.parametrize("args", [[], ["a", "b"], ["--into", "a"]])
def test_init_takes_one_directory(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *args]) == 2
    got = " ".join(args)
    assert f"error: DIR: expected one directory, got {got!r}" in capsys.readouterr().err


def test_init_refuses_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file")]) == 2
    assert "DIR: expected a directory, got 'the file " in capsys.readouterr().err


def test_init_in_a_clone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    before = {path: path.stat().st_mtime_ns for path in (REPOSITORY / "configs").rglob("*")}
    assert main(["init", "."]) == 0
    assert {path: path.stat().st_mtime_ns for path in (REPOSITORY / "configs").rglob("*")} == before


def test_each_decoder_decodes_one_prompt_before_it_is_timed(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[str, int]] = []
    plain = TextModel.decode

    def record(self: TextModel, prompts: Any, decoder: Any, *args: Any, **options: Any) -> Any:
        decoded.append((type(decoder).__name__, len(prompts)))
        return plain(self, prompts, decoder, *args, **options)

    monkeypatch.setattr(TextModel, "decode", record)
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    args += ["--trainer.enable_progress_bar=false", "--model.decoding.batch_size=8", "--data.eval_batch_size=8"]
    assert main([*args, "--model.decoders.one=RecomputeKV", "--model.sampling.max_new_tokens=16"]) == 0
    # The 12 prompts are batches of 8 and 4. A decoder's warm-up precedes its first batch.
    first_batch = [("ReFusion", 1), ("ReFusion", 8), ("RecomputeKV", 1), ("RecomputeKV", 8)]
    assert decoded == [*first_batch, ("ReFusion", 4), ("RecomputeKV", 4)]
    results = json.loads((tmp_path / "quickstart" / "version_0" / "results.json").read_text())["results"]
    assert {row["num_prompts"] for row in results.values()} == {12}, "the first prompt counts once"
