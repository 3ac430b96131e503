"""A ``test``, ``predict`` or ``generate`` that is interrupted keeps what is done, and resumes with the rest."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from refusion_lit.cli import main
from refusion_lit.evaluation.predictions import PredictionsFile
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.text_model import TextModel
from robustness.test_two_processes import MODEL, OPTIONS
from support.forks import act_at_call, start, wait

NUM_PROMPTS = 9
TIMES = {"seconds", "tokens_per_second", "latency_median", "latency_p95"}


def _args(command: str, folder: Path, version: str, *options: str) -> list[str]:
    args = [command, *OPTIONS, f"--data.task.num_test={NUM_PROMPTS}", f"--ckpt_path={MODEL}", f"--runs_dir={folder}"]
    return [*args, "--run_name=r", f"--run_version={version}", *options]


def _signal_at(decoder_name: str, call: int, number: signal.Signals) -> None:
    """Let the process send itself a signal when a decoder is called for the given time.

    The first call of a decoder is a warm-up. In the others, the decoders take turns in decoding batches of two prompts.
    """
    decode, num_calls = TextModel.decode, 0

    def signal_and_decode(self: TextModel, prompts: Any, decoder: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_calls
        if type(decoder).__name__ == decoder_name:
            num_calls += 1
            if num_calls == call:
                os.kill(os.getpid(), number)
        return decode(self, prompts, decoder, *args, **options)

    TextModel.decode = signal_and_decode


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the predictions in a file without their times."""
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]


def _figures(run: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a run by decoder, without times."""
    results = json.loads((run / "results.json").read_text())["results"]
    return {
        decoder: {name: value for name, value in figures.items() if name not in TIMES}
        for decoder, figures in results.items()
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    assert main(_args("test", folder, "v")) == 0
    return folder / "r" / "v"


@pytest.mark.parametrize(
    ("decoder", "number"),
    [
        ("ReFusion", signal.SIGKILL),
        ("ReFusion", signal.SIGINT),
        ("ReFusion", signal.SIGTERM),
        ("Autoregressive", signal.SIGKILL),
    ],
)
def test_test_resumes_and_its_figures_count_all_prompts(
    tmp_path: Path, unbroken: Path, decoder: str, number: signal.Signals
) -> None:
    run, log = tmp_path / "r" / "v", tmp_path / "log"
    args = _args("test", tmp_path, "v")
    code = wait(start(args, log, partial(_signal_at, decoder, 4, number)))
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert f"resume with: refusion-lit test --resume {run}\n" in log.read_text()
        assert "Traceback" not in log.read_text()
    # The call in which the signal comes is ReFusion's third batch, or follows it. SIGTERM takes effect after the batch.
    has_third_batch = decoder == "Autoregressive" or number == signal.SIGTERM
    assert len(_lines(run / "predictions_refusion.jsonl")) == (6 if has_third_batch else 4)
    with (run / "predictions_refusion.jsonl").open("a") as file:
        file.write('{"id": "torn')  # a line that the end of the process has cut
    assert main(["test", f"--resume={run}"]) == 0  # with the config that the run has saved
    for name in ("refusion", "other"):
        assert _lines(run / f"predictions_{name}.jsonl") == _lines(unbroken / f"predictions_{name}.jsonl")
    assert _figures(run) == _figures(unbroken)
    assert not list(run.glob(".*"))


def test_resuming_is_refused_under_other_settings_or_with_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = _args("predict", tmp_path, "v")
    assert wait(start(args, tmp_path / "log", partial(_signal_at, "ReFusion", 3, signal.SIGKILL))) == -signal.SIGKILL
    assert main([*args, "--model.resume=true", "--model.sampling.max_new_tokens=20"]) == 2
    assert "sampling.max_new_tokens was 24, is 20" in (capsys.readouterr().err)
    assert main([*args, "--model.resume=true", "--data.task.seed=1"]) == 2
    assert "prompts.digest was" in capsys.readouterr().err
    assert main([*args, "--model.resume=true"]) == 0
    ids = [line["id"] for line in _lines(tmp_path / "r" / "v" / "predictions.jsonl")]
    assert len(ids) == len(set(ids)) == NUM_PROMPTS
    assert main([*args, "--model.resume=true"]) == 0
    assert "there is nothing left to do" in capsys.readouterr().err
    path = tmp_path / "r" / "v" / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert main([*args, "--model.resume=true"]) == 2
    error = capsys.readouterr().err
    assert "resume: expected the predictions of an interrupted run" in error
    assert str(path) in error


@pytest.mark.parametrize("missing", ["refusion", "other"])
def test_only_the_decoder_without_predictions_is_tested_again(
    tmp_path: Path, unbroken: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "r" / "v"
    shutil.copytree(unbroken, run)
    (run / f"predictions_{missing}.jsonl").unlink()
    assert main(["test", f"--resume={run}"]) == 0
    assert _lines(run / f"predictions_{missing}.jsonl") == _lines(unbroken / f"predictions_{missing}.jsonl")
    assert _figures(run) == _figures(unbroken)
    actual, before = (json.loads((directory / "results.json").read_text()) for directory in (run, unbroken))
    assert actual["decoders"] == before["decoders"]
    assert actual["fingerprints"] == before["fingerprints"]
    (kept,) = before["results"].keys() - {missing}
    assert actual["results"][kept] == before["results"][kept]
    (run / "results.json").unlink()  # as of a run that was killed before it wrote the figures
    assert main(["test", f"--resume={run}"]) == 0
    again = json.loads((run / "results.json").read_text())
    assert (again["results"], again["fingerprints"]) == (actual["results"], actual["fingerprints"])
    assert main(["test", f"--resume={run}"]) == 0
    assert "nothing left to do" in capsys.readouterr().err


def test_a_full_disk_keeps_the_batches_before(tmp_path: Path, unbroken: Path) -> None:
    """A limit on the size of files, from the fourth write on, stands for the full disk."""

    def limit_files(file: PredictionsFile, *_: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = file.path.stat().st_size + 100  # bytes; a line has more
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    args = _args("test", tmp_path, "v")
    fill_up = partial(act_at_call, PredictionsFile, "write", 4, limit_files)
    assert wait(start(args, tmp_path / "log", fill_up)) == 2
    output = (tmp_path / "log").read_text()
    assert output.count("refusion-lit: error:") == 1
    assert "cannot be written (File too large)" in output
    assert main([*args, "--model.resume=true"]) == 0
    assert _figures(tmp_path / "r" / "v") == _figures(unbroken)


def test_running_out_of_memory_keeps_the_batches_before_and_names_the_options_to_lower(
    tmp_path: Path, unbroken: Path
) -> None:
    """The seventh call of a decoder asks for a cache of more memory than the process may have.

    Both decoders have then decoded a warm-up and two batches of two prompts.
    """

    def limit_memory(model: TextModel, *_: Any, **__: Any) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 28), resource.RLIM_INFINITY))
        model.backbone.make_cache = lambda rows: KVCache(3, rows, capacity=1 << 24)  # type: ignore[method-assign]

    args, run = _args("test", tmp_path, "v"), tmp_path / "r" / "v"
    fill_up = partial(act_at_call, TextModel, "decode", 7, limit_memory)
    assert wait(start(args, tmp_path / "log", fill_up)) == 2
    output = (tmp_path / "log").read_text()
    assert output.count("refusion-lit: error:") == 1
    assert "batch_size: expected prompts that fit into memory, got 2" in output
    assert "max_cache_tokens" in output
    names = ("predictions_refusion.jsonl", "predictions_other.jsonl")
    assert [len(_lines(run / name)) for name in names] == [4, 4]
    assert main(["test", f"--resume={run}", "--model.decoding.batch_size=1"]) == 0
    for name in names:
        assert _lines(run / name) == _lines(unbroken / name)


@pytest.mark.parametrize("command", ["test", "predict"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.sampling.max_new_tokens=500", "expected at most 12 tokens"),  # the model's context has 512
        ("--model.decoding.max_cache_tokens=26", "max_cache_tokens: expected at least "),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_decoding_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str, message: str
) -> None:
    assert main([*_args(command, tmp_path, "v"), option]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("refusion-lit: error:") == 1
    assert not list(tmp_path.rglob("predictions*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_new_tokens=510"], "prompt 1: expected at most 2 tokens"),  # the model's context has 512
        (["--max_new_tokens=16", "--max_cache_tokens=20"], "max_cache_tokens: expected at least "),
    ],
)
def test_generate_refuses_prompts_that_do_not_fit_before_decoding_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "output.jsonl"
    prompts.write_text("1>\n12+34,56+78>\n")
    args = ["generate", f"--ckpt_path={MODEL}", f"--prompts={prompts}", f"--output={output}", *options]
    assert main(args) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def generate_whole(folder: Path, num_prompts: int, batch_size: int) -> tuple[list[str], Path]:
    """Generate without interruption; return the command without its output, and the file of the answers."""
    prompts, whole = folder / "prompts.txt", folder / "whole.jsonl"
    prompts.write_text("".join(f"{i}0+11>\n" for i in range(1, num_prompts + 1)))
    args = ["generate", f"--ckpt_path={MODEL}", f"--prompts={prompts}", "--max_new_tokens=16"]
    args.append(f"--batch_size={batch_size}")
    assert main([*args, f"--output={whole}"]) == 0
    return args, whole


def test_generate_killed_again_and_again_resumes_to_its_end(tmp_path: Path) -> None:
    from refusion_lit.cli import generate

    args, whole = generate_whole(tmp_path, num_prompts=8, batch_size=2)
    output = tmp_path / "output.jsonl"

    def die_at(write: int, is_after: bool) -> None:
        """Let the process kill itself before or after it writes the metadata (the number of lines) for the given time.

        Before the write, the file holds lines that the metadata do not count.
        """
        generate._SECONDS_BETWEEN_WRITES = 0.0
        act_at_call(
            PredictionsFile, "_write_meta", write, lambda _: os.kill(os.getpid(), signal.SIGKILL), is_after=is_after
        )

    num_lines = []
    kills = [(1, False), (1, True), (3, False), (2, True), (4, False)]
    for number, (write, is_after) in enumerate(kills):
        resume = ["--resume"] if output.exists() else []
        patch = partial(die_at, write, is_after)
        code = wait(start([*args, f"--output={output}", *resume], tmp_path / f"log{number}", patch))
        assert code == -signal.SIGKILL, (tmp_path / f"log{number}").read_text()
        num_lines.append(len(output.read_text().splitlines()))
    assert num_lines[-1] > 2
    assert main([*args, f"--output={output}", "--resume"]) == 0
    assert sorted(_lines(output), key=lambda line: line["id"]) == sorted(_lines(whole), key=lambda line: line["id"])


def test_generate_resumes_after_its_output(tmp_path: Path) -> None:
    from refusion_lit.decoding import Generation  # noqa: F401 - loaded before the fork

    args, whole = generate_whole(tmp_path, num_prompts=5, batch_size=1)
    output = tmp_path / "output.jsonl"

    def interrupt_after_three_answers() -> None:
        from refusion_lit.cli.generate import AnswerWriter

        act_at_call(AnswerWriter, "on_finished", 3, lambda *_: os.kill(os.getpid(), signal.SIGINT), is_after=True)

    code = wait(start([*args, f"--output={output}"], tmp_path / "log", interrupt_after_three_answers))
    assert code == 128 + signal.SIGINT
    assert "refusion-lit: error: interrupted" in (tmp_path / "log").read_text()
    assert len(_lines(output)) == 3
    with output.open("a") as file:
        file.write('{"id": "3", "pro')
    assert main([*args, f"--output={output}", "--resume"]) == 0
    assert _lines(output) == _lines(whole)
    assert main([*args, f"--output={output}", "--resume"]) == 0
    assert _lines(output) == _lines(whole)
