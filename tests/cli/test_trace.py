"""``trace``: from a checkpoint to a page, and from a saved trace."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from refusion_lit.cli import main
from refusion_lit.traces.document import read_trace
from refusion_lit.traces.timeline import trace_statistics

MODELS = Path(__file__).parents[1] / "goldens" / "models"
CAUSAL, BIDIRECTIONAL = str(MODELS / "additions-mid"), str(MODELS / "additions-bidirectional")
PROMPT = "12+34,56+78>"


def test_a_trace_is_written_and_shown_again_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, html = tmp_path / "t.json", tmp_path / "t.html"
    model = ["trace", "--ckpt_path", CAUSAL, "--prompt", PROMPT, "--max_new_tokens=32"]
    assert main([*model, "--output", str(saved)]) == 0
    first = capsys.readouterr().out
    assert main(["trace", "--trace_file", str(saved), "--output", str(html)]) == 0
    assert capsys.readouterr().out == first
    trace = read_trace(saved)
    assert trace.response == "12+34=46;56+78=134;"
    assert "tokens per forward" in first
    assert html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("decoder", "model", "options"),
    [
        ("Autoregressive", CAUSAL, []),
        ("ReFusion", CAUSAL, ["--decoder.infill=autoregressive"]),
        ("RecomputeKV", CAUSAL, []),
        ("BlockDiffusion", BIDIRECTIONAL, ["--decoder.block_size=8"]),
        ("LLaDA", BIDIRECTIONAL, ["--attention=bidirectional", "--decoder.steps=16", "--decoder.block_length=16"]),
        ("FastDLLM", BIDIRECTIONAL, ["--attention=bidirectional", "--decoder.block_length=16"]),
    ],
)
def test_every_decoder_has_a_trace(decoder: str, model: str, options: list[str], tmp_path: Path) -> None:
    args = ["trace", "--ckpt_path", model, "--prompt", PROMPT, "--max_new_tokens=16", f"--decoder={decoder}", *options]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not fit this model")
        assert main([*args, "--allow_mismatch=true", "--output", str(tmp_path / "t.json")]) == 0
    trace = read_trace(tmp_path / "t.json")
    figures = trace_statistics(trace)
    assert trace.decoder == decoder
    assert int(figures["forwards"]) == len(trace.rounds)
    assert int(figures["tokens"]) == len(trace.token_ids) > 0
    if decoder == "Autoregressive":
        assert figures["tokens out of order"].startswith("0 of")
        assert figures["tokens accepted at a time"] == "1.00"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "prompt: expected --ckpt_path and --prompt"),
        (["--prompt=x"], "prompt: expected --ckpt_path and --prompt"),
        (["--ckpt_path=x", "--prompt="], "empty prompt"),
        (["--trace_file=x", "--prompt=x"], "trace_file: expected --trace_file alone"),
        (["--trace_file=nowhere.json"], "trace_file: expected a saved trace"),
        (["--trace_file=x", "--seconds_per_forward=1"], "unknown option 'seconds_per_forward'"),
        (["--trace_file=x", "--output=nowhere/t.html"], "output: expected a file in a directory"),
        (["--trace_file=x", "--output=t.png"], "output: expected a name that ends in .html or .json, got 't.png'"),
        (["--trace_file=x.json", "--output=x.json"], "output: expected a file other than"),
        (["--trace_file=x", "--format=json"], "unknown option 'format'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *args]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prompt_beyond_the_context_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["trace", "--ckpt_path", CAUSAL, "--prompt", "12+34," * 100, "--max_new_tokens=32"]
    assert main([*args, "--output", str(tmp_path / "t.html")]) == 2
    assert "expected at most 480 tokens (a context of 512 less max_new_tokens 32), got 600" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_broken_trace_leaves_an_earlier_page_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"format": "refusion-lit-trace", "version": 1}))
    (tmp_path / "t.html").write_text("earlier refusion-lit-trace")
    assert main(["trace", "--trace_file", str(tmp_path / "t.json"), "--output", str(tmp_path / "t.html")]) == 2
    assert "expected a refusion-lit-trace of version 2" in capsys.readouterr().err
    assert (tmp_path / "t.html").read_text() == "earlier refusion-lit-trace"


@pytest.mark.parametrize("name", ["t.json", "t.html"])
def test_only_traces_are_replaced(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / name
    trace = ["trace", "--ckpt_path", CAUSAL, "--prompt", PROMPT, "--max_new_tokens=8", "--output", str(output)]
    output.write_text("notes")
    assert main(trace) == 2
    assert f"output: expected a new file, or one with a trace, got '{output}, " in capsys.readouterr().err
    assert output.read_text() == "notes"
    output.unlink()
    assert main(trace) == 0
    assert main(trace) == 0, "a trace is replaced"
