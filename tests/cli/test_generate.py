"""``generate``: streaming, stop strings, files of prompts and answers."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import refusion_lit
from cli.conftest import KEYS, REPOSITORY
from refusion_lit.cli import main
from refusion_lit.cli.generate import AnswerStream, build_parser, read_prompts
from refusion_lit.decoding import ReFusion, RowState
from refusion_lit.evaluation.predictions import PredictionsFile, write_predictions
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from support.forks import fork, wait

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"


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
    assert f"resume: {output} was made with " in error
    assert message in error
    assert output.read_bytes() == before


def test_a_file_of_answers_is_written_by_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    generate = ["generate", f"--ckpt_path={MODEL}", "--prompt=12+34>", "--max_new_tokens=24", f"--output={output}"]
    is_ready, may_end = multiprocessing.Event(), multiprocessing.Event()

    def hold() -> None:
        file = PredictionsFile(output, {"prompts": {"num_prompts": 9}})
        file.write([{"id": "0", "response": "another process's"}])
        is_ready.set()
        may_end.wait(60)
        file.close()

    other = fork(hold)
    assert is_ready.wait(60)
    before = output.read_text()
    for extra in (["--overwrite"], ["--resume"]):
        assert main([*generate, *extra]) == 2
        error = capsys.readouterr().err
        assert f"output: expected no other process that writes {output}" in error
    assert output.read_text() == before
    may_end.set()
    assert wait(other) == 0
    assert main([*generate, "--overwrite"]) == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["12+34>"]


def test_answers_are_replaced_only_when_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    generate = ["generate", f"--ckpt_path={MODEL}", "--max_new_tokens=24", f"--output={output}"]
    assert main([*generate, "--prompt=12+34>"]) == 0
    answers = output.read_text()
    assert main([*generate, "--prompt=1+3>"]) == 2
    assert "output: expected a new file" in capsys.readouterr().err
    assert output.read_text() == answers
    assert main([*generate, "--prompt=1+3>", "--overwrite"]) == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["1+3>"]


def test_a_boolean_option_alone_means_true() -> None:
    parsed = build_parser().parse(["--batch_invariant", "--ckpt_path=x", "--share_prefixes", "false", "--resume"])
    actual = [parsed[name] for name in ("batch_invariant", "share_prefixes", "resume", "overwrite")]
    assert actual == [True, False, True, False]
    with pytest.raises(ValueError, match=r"^overwrite: .*bool.*5"):
        build_parser().parse(["--ckpt_path=x", "--overwrite", "5"])


def test_generate_streams_one_prompt(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", f"--ckpt_path={checkpoint}", "--max_new_tokens=12", "--prompt=12+34>"]
    assert main([*args, "--decoder=ReFusion", "--decoder.slot_size=4"]) == 0
    model = refusion_lit.load(checkpoint)
    expected = model.generate(["12+34>"], decoder=ReFusion(slot_size=4), max_new_tokens=12)[0]
    captured = capsys.readouterr()
    assert captured.out == f"{expected.text}\n"
    assert f"ReFusion: {expected.num_tokens} tokens, {expected.num_forwards} forwards" in captured.err
    num_parameters = sum(parameter.numel() for parameter in model.backbone.parameters())
    assert f": {num_parameters / 1000:.1f} thousand parameters, " in captured.err


@pytest.mark.parametrize("to_file", [False, True])
def test_generate_cuts_at_stop_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str], to_file: bool) -> None:
    output = tmp_path / "out.jsonl"
    args = [
        "generate",
        f"--ckpt_path={MODEL}",
        "--prompt=12+34,56+78>",
        '--stop=["6;", "78="]',
        "--decoder.slot_size=4",
    ]
    assert main([*args, *([f"--output={output}"] if to_file else [])]) == 0
    text = json.loads(output.read_text())["response"] if to_file else capsys.readouterr().out.rstrip("\n")
    assert text == "12+34=4"


def test_the_beginning_of_a_stop_string_is_not_printed_too_early(capsys: pytest.CaptureFixture[str]) -> None:
    special = SpecialTokens(mask_token_id=2, eos_token_ids=(1,), pad_token_id=0, vocab_size=200)
    text = "one STOP"
    state = RowState(
        prompt=Prompt(token_ids=(5,), id="0"),
        sampling=SamplingParams(max_new_tokens=8, stop=(" STOP",)),
        special_tokens=special,
    )
    # Here the token ids of a character are its code points.
    stream = AnswerStream(lambda ids, **_: "".join(map(chr, ids)), state.sampling, "ReFusion")
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
    ]
    assert main([*args, "--seed=1", "--dtype=float64", "--device=cpu"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 2
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


def test_an_output_that_cannot_be_opened_keeps_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    write_predictions(path, [{"id": "0"}], {"weights": "a"})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    opened = Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:  # root may write read-only files
        if self == path and mode[0] in "aw":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"output: expected a file that can be written, got .*out\.jsonl"):
        PredictionsFile(path, {"weights": "a"})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_directory_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dir").mkdir()
    for output, option in ((tmp_path / "dir", ["--overwrite"]), (".", []), ("/", [])):
        assert main(["generate", "--ckpt_path=x", "--prompt=1", f"--output={output}", *option]) == 2
        assert "output: expected a file, got" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["dir"]


@pytest.mark.parametrize("prompt", ["--prompt=12+34>", "--prompts=prompts.txt"])
def test_a_missing_schema_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("12+34>\n")
    assert main(["generate", "--ckpt_path=no_such_model", prompt, "--json_schema=missing.json"]) == 2
    assert capsys.readouterr().err.startswith("refusion-lit: error: json_schema: ")


@pytest.mark.parametrize("to_file", [False, True])
def test_a_model_is_checked_once(tmp_path: Path, to_file: bool) -> None:
    options = [f"--ckpt_path={MODEL}", "--prompt=1+2>", "--max_new_tokens=2", "--decoder=LLaDA", "--allow_mismatch"]
    output = [f"--output={tmp_path / 'answers.jsonl'}"] if to_file else []
    with pytest.warns(UserWarning, match="LLaDA does not fit") as warned:
        assert main(["generate", *options, *output]) == 0
    assert sum("LLaDA does not fit" in str(warning.message) for warning in warned) == 1


def test_a_refused_schema_keeps_the_answers_of_another_run(tmp_path: Path) -> None:
    output, schema = tmp_path / "answers.jsonl", tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}}')
    options = ["generate", f"--ckpt_path={MODEL}", "--prompt=1+2>", f"--output={output}"]
    assert main([*options, "--max_new_tokens=2"]) == 0
    before = output.read_text()
    assert main([*options, "--overwrite", f"--json_schema={schema}", "--max_new_tokens=2"]) == 2
    assert output.read_text() == before


def test_generate_keeps_what_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    args = ["generate", f"--ckpt_path={MODEL}", "--prompt=12+34,56+78>", "--max_new_tokens=32", f"--output={output}"]
    output.write_text('{"id": "0", "prompt": "mine"}\n')
    assert main(args) == 2
    message = "output: expected a new file, or one with predictions of refusion-lit, got "
    assert f"{message}'{output}, " in capsys.readouterr().err
    assert output.read_text() == '{"id": "0", "prompt": "mine"}\n'
    assert main([*args, "--overwrite"]) == 0
    first = json.loads(output.read_text())
    assert first["response"] == "12+34=46;56+78=134;"
    assert main([*args, "--overwrite", "--max_new_tokens=40"]) == 0
    assert main([*args, "--resume"]) == 2
    assert "max_new_tokens was 40, is 32" in capsys.readouterr().err
    assert main([*args, "--resume", "--max_new_tokens=40"]) == 0
    assert "nothing left to do" in capsys.readouterr().err
