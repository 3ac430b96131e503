"""The promised commands, from fit to text, as a user runs them."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli import main
from refusion_lit.cli.answers import read_prompts
from refusion_lit.decoding import ReFusion
from refusion_lit.evaluation.predictions import KEYS, PredictionsFile, write_predictions

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
ABLATION = str(REPOSITORY / "configs" / "ablation.yaml")
TINY_TEST = [option for option in TINY if "trainer." not in option and "backbone" not in option]


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
    assert figures["num_prompts"] == len(lines) == 12
    assert len({line["id"] for line in lines}) == 12
    tokens, forwards = (sum(line[key] for line in lines) for key in ("num_tokens", "num_forwards"))
    assert (figures["num_tokens"], figures["num_forwards"]) == (tokens, forwards)
    assert figures["tokens_per_forward"] == pytest.approx(tokens / forwards)
    assert figures["score"] == pytest.approx(sum(line["score"] for line in lines) / 12)


@pytest.mark.parametrize("source", ["checkpoint", "directory"])
def test_a_checkpoint_or_a_directory_brings_the_model(checkpoint: str, tmp_path: Path, source: str) -> None:
    path = checkpoint if source == "checkpoint" else MODEL
    config = {"model": {"backbone": {"random_init": True}}}  # the training's, of no use here
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


def test_random_weights_are_told_of(tmp_path: Path) -> None:
    args = ["validate", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}", "--model.schedule.warmup_steps=1"]
    with pytest.warns(UserWarning, match="ckpt_path: none given, so that the model has random weights"):
        assert main([option for option in args if "max_steps" not in option]) == 0


def test_batch_size_changes_no_prediction(checkpoint: str, tmp_path: Path) -> None:
    texts = []
    for size in (1, 5):
        args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
        args += [
            f"--model.decoding.max_batch_size={size}",
            f"--run_version=b{size}",
            "--trainer.enable_progress_bar=false",
        ]
        assert main(args) == 0
        lines = (tmp_path / "quickstart" / f"b{size}" / "predictions_refusion.jsonl").read_text().splitlines()
        values = [json.loads(line) for line in lines]
        texts.append([(v["id"], v["response_ids"], v["num_forwards"]) for v in values])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("record", [False, True])
def test_predict_writes_exactly_the_documented_keys(checkpoint: str, tmp_path: Path, record: bool) -> None:
    args = ["predict", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    args += [f"--model.decoding.record_forwards={record}", "--trainer.enable_progress_bar=false"]
    assert main(args) == 0
    lines = (tmp_path / "quickstart" / "version_0" / "predictions.jsonl").read_text().splitlines()
    expected = [key for key in KEYS if record or key != "forward_shapes"]
    for line in map(json.loads, lines):
        assert list(line) == expected
        if record:
            assert len(line["forward_shapes"]) == line["num_forwards"]


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


def test_export_loads_in_transformers_and_in_ours(checkpoint: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "exported"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}"]) == 0
    config = json.loads((directory / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert config["mask_token_id"] == tokenizer.mask_token_id
    assert config["refusion_lit"]["predictions"] == ["mask", "next_token_in_slot"]
    assert (directory / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(directory)
    ours, from_checkpoint = refusion_lit.load(directory), refusion_lit.load(checkpoint)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.ones_like(ids)).logits
        hidden = ours.backbone.hidden_states(ids, torch.arange(4)[None], None)
        torch.testing.assert_close(ours.backbone.logits(hidden), expected)
    options = {"decoder": ReFusion(slot_size=4), "max_new_tokens": 12}
    assert (
        ours.generate(["12+34>"], **options)[0].token_ids
        == from_checkpoint.generate(["12+34>"], **options)[0].token_ids
    )
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}"]) == 2


def test_results_of_another_model_are_not_on_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"results": {"d": {"score": 1.0}}, "fingerprints": {"d": {"weights": "0123456789abcdef"}}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    output = tmp_path / "out"
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={output}", f"--results={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert f"results: {tmp_path} was made for something else: weights was '0123456789abcdef', is '" in error
    assert not output.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--decoder.slot_size=4"], "decoder.slot_size was 8, is 4"),
        (["--max_new_tokens=24"], "sampling.max_new_tokens was 16, is 24"),
        (["--dtype=bfloat16"], "dtype was 'float32', is 'bfloat16'"),
        (["--ckpt_path", str(MODEL.with_name("additions-mid"))], "weights was '"),
        (["--prompts", "OTHER"], "prompts.digest was '"),
    ],
)
def test_generate_resumes_only_with_its_prompts_options_and_model(
    change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, others, output = tmp_path / "prompts.txt", tmp_path / "others.txt", tmp_path / "out.jsonl"
    prompts.write_text("12+34>\n1+2>\n")
    others.write_text("12+34>\n1+3>\n")
    arguments = [
        "generate",
        f"--ckpt_path={MODEL}",
        "--max_new_tokens=16",
        f"--output={output}",
        f"--prompts={prompts}",
    ]
    assert main(arguments) == 0
    before = output.read_bytes()
    change = [str(others) if part == "OTHER" else part for part in change]
    assert main([*arguments, "--resume", *change]) == 2
    error = capsys.readouterr().err
    assert f"resume: {output} was made for something else: " in error
    assert message in error
    assert output.read_bytes() == before


class FakeHub:
    """Stands for the hub; remembers what was sent."""

    sent: dict[str, object]

    def create_repo(self, repository: str, **options: object) -> None:
        self.sent["created"] = (repository, options)

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.sent["files"] = {path.name for path in Path(folder_path).iterdir()}


_HOLDS_A_FILE = """
import sys
from pathlib import Path
from refusion_lit.evaluation.predictions import PredictionsFile
file = PredictionsFile(Path(sys.argv[1]), {"prompts": {"num_prompts": 9}})
file.write([{"id": "0", "response": "another process's"}])
print("ready", flush=True)
sys.stdin.read()
file.close()
"""


def test_a_file_of_answers_is_written_by_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    generate = ["generate", f"--ckpt_path={MODEL}", "--prompt=12+34>", "--max_new_tokens=24", f"--output={output}"]
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS_A_FILE, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        before = output.read_text()
        for extra in ([], ["--overwrite"], ["--resume"]):
            assert main([*generate, *extra]) == 2
            error = capsys.readouterr().err
            assert f"output: another process is writing {output}; wait for it, or choose another file." in error
        assert output.read_text() == before
        other.stdin.close()
    assert main(generate) == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["12+34>"]


def test_export_writes_a_card_from_the_run_and_uploads(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    test = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*test, "--trainer.enable_progress_bar=false"]) == 0
    sent: dict[str, object] = {}
    monkeypatch.setattr(FakeHub, "sent", sent, raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    directory, run = tmp_path / "exported", tmp_path / "quickstart" / "version_0"
    args = ["export", f"--ckpt_path={checkpoint}", f"--output={directory}", f"--results=[{run}]"]
    assert main([*args, "--push_to_hub=someone/adder"]) == 0
    assert sent["created"] == ("someone/adder", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors", "config.json"} <= set(sent["files"])  # type: ignore[call-overload]
    card = (directory / "README.md").read_text()
    figures = json.loads((run / "results.json").read_text())["results"]["refusion"]
    assert f"| `refusion` | {figures['score']:.3f} | {figures['tokens_per_forward']:.2f} |" in card
    assert "refusion_lit.load('someone/adder')" in card
    assert "| objective | Hybrid(" in card
    assert "| task | Additions(" in card
    assert main([*args[:-1], f"--results=[{tmp_path}]", f"--output={tmp_path / 'other'}"]) == 2


def test_a_failed_upload_leaves_the_directory_and_says_how_to_go_on(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def fails(self: FakeHub, repository: str, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(FakeHub, "create_repo", fails)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    directory = tmp_path / "exported"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}", "--push_to_hub=a/b"]) == 2
    assert "push_to_hub: the upload to 'a/b' failed (no network)" in capsys.readouterr().err
    assert (directory / "model.safetensors").is_file()


def test_the_files_of_an_export_have_the_usual_permissions(checkpoint: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'exported'}"]) == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}
    assert "model.safetensors" in {path.name for path in files}


def test_a_failed_export_leaves_nothing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_disk: Callable[[int | None], None]
) -> None:
    small_disk(20_000)
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'a' / 'exported'}"]) == 2
    error = capsys.readouterr().err
    assert f"output: {tmp_path / 'a' / 'exported'} cannot be written (" in error
    assert "File too large" in error
    assert list(tmp_path.iterdir()) == []


def test_an_exported_directory_keeps_the_prompt_template(checkpoint: str, tmp_path: Path) -> None:
    from refusion_lit.modeling.saving import save_model

    model = refusion_lit.load(checkpoint)
    save_model(model.backbone, model.tokenizer, tmp_path / "exported", prompt_template="{query}>")
    assert refusion_lit.load(tmp_path / "exported").prompt_template == "{query}>"
    assert model.prompt_template == "{query}"


def test_generate_streams_one_prompt(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", f"--ckpt_path={checkpoint}", "--max_new_tokens=12", "--prompt=12+34>"]
    assert main([*args, "--decoder=ReFusion", "--decoder.slot_size=4"]) == 0
    model = refusion_lit.load(checkpoint)
    expected = model.generate(["12+34>"], decoder=ReFusion(slot_size=4), max_new_tokens=12)[0]
    captured = capsys.readouterr()
    assert captured.out == f"{expected.text}\n"
    assert f"{expected.num_tokens} tokens, {expected.num_forwards} forwards" in captured.err


@pytest.mark.parametrize("to_file", [False, True])
def test_generate_cuts_at_stop_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str], to_file: bool) -> None:
    model = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
    output = tmp_path / "out.jsonl"
    args = [
        "generate",
        f"--ckpt_path={model}",
        "--prompt=12+34,56+78>",
        '--stop=["6;", "78="]',
        "--decoder.slot_size=4",
    ]
    assert main([*args, *([f"--output={output}"] if to_file else [])]) == 0
    text = json.loads(output.read_text())["response"] if to_file else capsys.readouterr().out.rstrip("\n")
    assert text == "12+34=4"


def test_the_beginning_of_a_stop_string_is_not_printed_too_early(capsys: pytest.CaptureFixture[str]) -> None:
    from refusion_lit.cli.generate import Stream
    from refusion_lit.decoding import RowState
    from refusion_lit.types import Prompt, SamplingParams, SpecialTokens

    special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=200)
    text = "one STOP"
    state = RowState(
        prompt=Prompt(token_ids=(5,), id="0"),
        sampling=SamplingParams(max_new_tokens=8, stop=(" STOP",)),
        special_tokens=special,
        tokens=[0] * 8,
        is_masked=[True] * 8,
    )
    stream = Stream(lambda ids: "".join(map(chr, ids)), (" STOP",))
    printed = ""
    for place, character in enumerate(text):
        state.commit([place], [ord(character)])
        stream.on_commit(0, state)
        printed += capsys.readouterr().out
        assert "one".startswith(printed)
    assert printed == "one"


@pytest.mark.parametrize("source", ["lines", "jsonl", "stdin"])
def test_generate_reads_files(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    prompts = ["12+34>", "11+11,22+22>"]
    plain = "\n".join(prompts) + "\n"
    objects = "".join(json.dumps({"id": f"p{i}", "prompt": p, "reference": "?"}) + "\n" for i, p in enumerate(prompts))
    path = tmp_path / ("prompts.jsonl" if source == "jsonl" else "prompts.txt")
    path.write_text(objects if source == "jsonl" else plain)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(plain.encode())))
    output = tmp_path / "out.jsonl"
    args = ["generate", f"--ckpt_path={checkpoint}", f"--prompts={'-' if source == 'stdin' else path}"]
    args += [
        f"--output={output}",
        "--max_new_tokens=16",
        "--batch_size=2",
        "--max_tokens_per_forward=90",
        "--record_forwards=true",
    ]
    assert main([*args, "--seed=1", "--dtype=float64", "--device=cpu"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [list(line) for line in lines] == [list(KEYS)] * 2
    assert sorted(line["prompt"] for line in lines) == sorted(prompts)
    assert {line["id"] for line in lines} == ({"p0", "p1"} if source == "jsonl" else {"0", "1"})


def test_standard_input_is_read_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"\xef\xbb\xbf1+1>\r\n2+2>\n"
    path = tmp_path / "prompts.txt"
    for source in (str(path), "-"):
        path.write_bytes(content)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        assert [request.prompt for request in read_prompts(source)] == ["1+1>", "2+2>"]
        path.write_bytes(b"caf\xe9")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
        with pytest.raises(ValueError, match=r"prompts: .* is not UTF-8 text"):
            list(read_prompts(source))


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_cannot_be_opened_keeps_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path = tmp_path / "out.jsonl"
    write_predictions(path, [{"id": "0"}], {"weights": "a"})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    opened = Path.open

    def refused(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:  # root may write read-only files
        if self == path and mode[0] in "aw":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ValueError, match=r"output: expected a file that can be written, got .*out\.jsonl"):
        PredictionsFile(path, {"weights": "a"}, overwrite=overwrite)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_directory_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dir").mkdir()
    assert main(["generate", "--ckpt_path=x", "--prompt=1", f"--output={tmp_path / 'dir'}", "--overwrite"]) == 2
    assert "output: expected a file, got" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["dir"]


def test_any_optimizer_and_schedule_by_class_path(tmp_path: Path) -> None:
    args = ["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={tmp_path}", "--model.optimizer=torch.optim.SGD"]
    args += ["--model.optimizer.lr=0.25", "--model.lr_scheduler=torch.optim.lr_scheduler.ConstantLR"]
    assert main([*args, "--model.lr_scheduler.factor=0.5"]) == 0
    header, *rows = (tmp_path / "quickstart" / "version_0" / "metrics.csv").read_text().splitlines()
    column = next(i for i, name in enumerate(header.split(",")) if name.startswith("lr-SGD"))
    assert {row.split(",")[column] for row in rows} - {""} == {"0.125"}


@pytest.mark.parametrize("args", [["--help"], ["fit", "--help=all"], ["generate", "--help"]])
def test_a_reader_that_leaves_early_ends_a_command_silently(args: list[str]) -> None:
    command = [sys.executable, "-m", "refusion_lit.cli", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_full_disk_behind_standard_output_is_named() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "refusion_lit.cli", "--help"], stdout=full, stderr=subprocess.PIPE,
                              check=False)  # fmt: skip
    message = b"refusion-lit: error: standard output or a log file: No space left on device\n"
    assert (done.returncode, done.stderr.startswith(message)) == (2, True)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"refusion-lit {refusion_lit.__version__}"


def test_help_begins_with_a_short_usage_and_names_one_way_to_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: refusion-lit fit --config FILE [--OPTION VALUE ...]\n\n")
    options = {word for line in shown.splitlines() for word in line.split()[:1] if word.startswith("--")}
    assert {"--model.optimizer", "--ckpt_path", "--data.batch_size"} <= options
    assert "--optimizer" not in options


def test_init_copies_the_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "configs" / "quickstart.yaml").read_text() == Path(QUICKSTART).read_text()
    assert main(["init", str(tmp_path)]) == 0  # what is there is kept
    (tmp_path / "configs" / "quickstart.yaml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "configs/quickstart.yaml, which was changed" in capsys.readouterr().err
    assert (tmp_path / "configs" / "quickstart.yaml").read_text() == "mine"


def test_init_in_a_clone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    before = {path: path.stat().st_mtime_ns for path in (REPOSITORY / "configs").rglob("*")}
    assert main(["init", "."]) == 0
    assert {path: path.stat().st_mtime_ns for path in (REPOSITORY / "configs").rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fitt"], "did you mean 'fit'"),
        (["fit", "--config", QUICKSTART, "--model.decoders.refusion.slot_sise=4"], "slot_size'?"),
        (["fit", "--config", QUICKSTART, "--model.decoders.refusion.slot_size=0"], "slot_size: expected"),
        (["fit", "--config", QUICKSTART, "--model.decoders.refusion.slot_threshold=1.5"], "slot_threshold: expected"),
        (
            ["fit", "--config", QUICKSTART, "--model.decoders.refusion.num_serial_blocks=9"],
            "num_serial_blocks: expected at most 8",
        ),
        (["fit", "--config", QUICKSTART, "--model.sampling.max_new_tokens=-1"], "max_new_tokens: expected"),
        (["fit", "--config", QUICKSTART, "--model.objective=Hybird"], "did you mean 'Hybrid'"),
        (["fit", "--config", QUICKSTART, "--trainer.max_stepz=3"], "max_steps"),
        (["fit", "--config", "missing.yaml"], "missing.yaml"),
        (["generate", "--ckpt_path=x.ckpt", "--prompt=1", "--decoder=ReFuson"], "did you mean 'ReFusion'"),
        (["generate", "--ckpt_path=x.ckpt", "--prompt=1", "--decoder.slot_sise=2"], "slot_size'?"),
        (["generate", "--ckpt_path=missing.ckpt", "--prompt=1"], "missing.ckpt"),
        (["generate", "--ckpt_path=x.ckpt"], "exactly one of --prompt and --prompts"),
        (["generate", "--ckpt_path=x.ckpt", "--prompt="], "empty prompt"),
        (["generate", "--ckpt_path=x.ckpt", "--prompt=1", "--output="], "output: expected a file's name, got ''"),
        (["test", "--config", QUICKSTART, "--ckpt_path=missing.ckpt"], "missing.ckpt"),
        (
            ["test", "--config", ABLATION],
            "ckpt_path: expected a checkpoint, a Hugging Face directory or a hub id to test",
        ),
        (
            ["test", "--config", QUICKSTART, "--ckpt_path=some/one"],
            "error: ckpt_path: expected a directory or a hub",
        ),
        (["test", "--config", ABLATION, "--ckpt_path=best"], "got 'best', which only a training knows"),
        (
            ["fit", "--config", ABLATION],
            "backbone: expected a source (directory or hub id) or a config with model_type",
        ),
        (["fit"], "data.task: expected a value, got none; give it, or a config"),
        (
            ["fit", "quickstart.yaml"],
            "expected options, which start with --",
        ),
        (["generate"], "ckpt_path: expected a value, got none; give it."),
        (["fit", "--config", QUICKSTART, "--data.task=Hybrid"], "choose one of Additions, Gsm8k, Holes, HumanEval"),
        (
            ["fit", "--config", QUICKSTART, "--data.task=none.Task"],
            "got none.Task (no module 'none'); install the module",
        ),
        (
            ["fit", "--config", QUICKSTART, "--data.task=json.JSONDecoder"],
            '"data.task": Import path json.JSONDecoder does not correspond to a subclass of Task',
        ),
        (["fit", "--config", QUICKSTART, "--model.optimizer=Adamm"], "did you mean 'Adam'?"),
        (
            ["fit", "--config", QUICKSTART, "--model.decoders.refusion.slot_size=x"],
            "model.decoders.refusion.slot_size: expected an integer, got 'x'; set it to such a value",
        ),
        (
            ["fit", "--config", QUICKSTART, "--model.backbone.attention=up"],
            "model.backbone.attention: expected ",
        ),
        (["fit", "--config", QUICKSTART, "--num_threads=0"], "num_threads: expected an integer of at least 1, got 0"),
        (["fit", "--config", QUICKSTART, "--trainer.val_check_interval=x"], "trainer: Invalid time format"),
        (
            ["fit", "--config", QUICKSTART, "--model.backbone.config.model_type=qwen33"],
            "model_type: expected one that transformers knows, got 'qwen33'; did you mean 'qwen3'?",
        ),
        (["generate", "--ckpt_path=x", "--prompt=1", "--decoder=no.yaml"], "got no.yaml, which does not exist"),
        (
            ["generate", "--ckpt_path=x", "--prompt=1", "--dtype=fp32"],
            "bfloat16 or float16, got 'fp32'; set it to such a value",
        ),
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
