"""Commands on published checkpoints, with nothing but --ckpt_path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refusion_lit.cli import main
from refusion_lit.types import SamplingParams
from support.published import MODELS, published_model

PROMPT = "12+34,56+78>"
NAMES = ["llada-tiny", "dream-tiny", "fast-dllm-v2-tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_generate_needs_the_path_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"--ckpt_path={MODELS[name]}", f"--prompt={PROMPT}"]) == 0
    (expected,) = published_model(name).generate([PROMPT], sampling=SamplingParams(max_new_tokens=128))
    assert capsys.readouterr().out == f"{expected.text}\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_prompts_is_answered_as_one_prompt_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n7+8,1+1>\n")
    output = tmp_path / "answers.jsonl"
    assert main(["generate", f"--ckpt_path={MODELS[name]}", f"--prompts={tmp_path / 'prompts.txt'}",
                 f"--output={output}", "--max_new_tokens=16"]) == 0  # fmt: skip
    (expected,) = published_model(name).generate([PROMPT], max_new_tokens=16)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["response"] for line in lines if line["id"] == "0"] == [expected.text]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [8, 30, 37])
def test_the_default_decoder_adapts_to_the_length(name: str, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--ckpt_path={MODELS[name]}", f"--prompt={PROMPT}", f"--max_new_tokens={length}"]
    assert main(["generate", *options]) == 0
    (row,) = published_model(name).generate([PROMPT], max_new_tokens=length)
    assert 0 < row.num_tokens <= length
    assert capsys.readouterr().out == f"{row.text}\n"


def test_a_given_block_length_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--decoder=LLaDA", "--decoder.block_length=32"]
    options = [f"--ckpt_path={MODELS['llada-tiny']}", f"--prompt={PROMPT}", "--max_new_tokens=30", *given]
    assert main(["generate", *options]) == 2
    assert "block_length: expected a divisor of max_new_tokens (30), got 32" in capsys.readouterr().err


@pytest.mark.filterwarnings("default:the model's config")
def test_a_guessed_decoder_is_told_and_a_named_one_is_not(recwarn: pytest.WarningsRecorder) -> None:
    options = [f"--ckpt_path={MODELS['bd3lm-tiny']}", f"--prompt={PROMPT}", "--max_new_tokens=8"]
    with pytest.warns(UserWarning, match=r"ReFusion .*--attention, --block_size"):
        assert main(["generate", *options]) == 0
    with pytest.warns(UserWarning, match=r"ReFusion is assumed"):
        assert main(["generate", *options, "--decoder.slot_size=4"]) == 0
    assert main(["generate", *options, "--attention=block_causal", "--block_size=4"]) == 0
    assert main(["generate", *options, "--decoder=ReFusion"]) == 0
    assert [warning for warning in recwarn if "config does not say" in str(warning.message)] == []


@pytest.mark.parametrize("name", NAMES)
def test_test_takes_decoder_and_ids_from_the_path(name: str, tmp_path: Path) -> None:
    task = ["--data.task=Additions", "--data.task.num_test=3", "--trainer.enable_progress_bar=false",
            "--model.sampling.max_new_tokens=32"]  # fmt: skip
    assert main(["test", f"--ckpt_path={MODELS[name]}", *task, f"--runs_dir={tmp_path}", "--num_threads=1"]) == 0
    (results,) = tmp_path.rglob("results.json")
    decoder = type(published_model(name).default_decoder).__name__
    stored = json.loads(results.read_text())
    assert list(stored["decoders"]) == [decoder.lower()]
    assert decoder in json.dumps(stored["decoders"])
    (predictions,) = tmp_path.rglob("predictions_*.jsonl")
    assert len(predictions.read_text().splitlines()) >= 3


def test_export_writes_our_own_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = tmp_path / "ours"
    assert main(["export", f"--ckpt_path={MODELS['llada-tiny']}", f"--output={ours}"]) == 0
    assert json.loads((ours / "config.json").read_text())["model_type"] == "llama"
    capsys.readouterr()
    assert main(["export", f"--ckpt_path={ours}", f"--output={tmp_path / 'no'}", "--layout=llada"]) == 2
    assert "unknown option 'layout'" in capsys.readouterr().err
