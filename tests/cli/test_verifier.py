"""A verifier for APD, by the command line and from Python."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

import refusion_lit
from refusion_lit.checkpoints.models import pair
from refusion_lit.cli import main
from refusion_lit.cli.chat import Chat, build_parser
from refusion_lit.cli.model_options import Setup, build_sampling
from refusion_lit.contrib import APD
from refusion_lit.contrib.apd import PairedModel
from refusion_lit.decoding import decode
from refusion_lit.modeling.load import BackboneConfig, DType
from refusion_lit.tasks import Additions
from refusion_lit.types import DecodingOptions, Prompt, SamplingParams

ADDITIONS = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
"""A directory that does not state what its model was trained for."""
QUERY = "12+34,56+78>"


def test_generate_takes_a_verifier(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ckpt_path", str(ADDITIONS), "--attention", "bidirectional", "--max_new_tokens", "12"]
    assert main(["generate", *options, "--prompt", QUERY, "--decoder", "APD", "--verifier", str(ADDITIONS)]) == 0
    printed = capsys.readouterr().out.strip()

    masked = refusion_lit.load(ADDITIONS, overrides=BackboneConfig(source=str(ADDITIONS), attention="bidirectional"))
    verifier = refusion_lit.load(ADDITIONS).backbone
    prompt = Prompt(token_ids=tuple(masked.encode(QUERY)), id="0")
    with torch.no_grad():
        pair = PairedModel(masked.backbone, verifier)
        [row] = decode(pair, APD(), [prompt], SamplingParams(max_new_tokens=12), detokenize=masked.detokenize).rows
    assert row.text.strip() in printed
    assert row.text.strip()


def test_apd_without_a_verifier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ckpt_path", str(ADDITIONS), "--attention", "bidirectional", "--prompt", QUERY]
    assert main(["generate", *options, "--decoder", "APD"]) == 2
    assert "--verifier" in capsys.readouterr().err


@pytest.mark.parametrize("decoder", [[], ["--decoder=ReFusion"]])
def test_a_verifier_that_is_not_used_is_refused(decoder: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--ckpt_path=missing", f"--prompt={QUERY}", "--verifier=missing", *decoder]) == 2
    assert "verifier: expected a decoder that uses a verifier" in capsys.readouterr().err


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """A masked model whose directory says what it was trained for."""
    path = tmp_path / "masked"
    shutil.copytree(ADDITIONS.parent / "additions-bidirectional", path)
    config = json.loads((path / "config.json").read_text())
    config["refusion_lit"] = {"attention": "bidirectional", "predictions": ["mask"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_chat_takes_a_verifier(
    masked: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [f"--ckpt_path={masked}", "--decoder=APD", f"--verifier={ADDITIONS}", "--max_new_tokens=12"]
    monkeypatch.setattr("sys.stdin", io.StringIO(QUERY))
    assert main(["chat", *options]) == 0
    expected = refusion_lit.load(masked, verifier=ADDITIONS).generate([QUERY], decoder=APD(), max_new_tokens=12)
    assert capsys.readouterr().out.startswith(expected[0].text + "\n")


def test_the_context_of_a_chat_is_the_shorter_one() -> None:
    model = refusion_lit.load(ADDITIONS, overrides=BackboneConfig(source=str(ADDITIONS), attention="bidirectional"))
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    other = refusion_lit.load(ADDITIONS)
    other.backbone.max_positions = 40
    pair(model, other)
    options: Any = build_parser().parse(
        ["--ckpt_path=any", "--decoder=APD", f"--verifier={ADDITIONS}", "--max_new_tokens=16"]
    )
    shown = io.StringIO()
    setup = Setup(model, options.decoder, build_sampling(options), DecodingOptions())
    chat = Chat(setup, None, Console(file=shown, width=200))
    # A character is a token: the earlier turn and the question have 46. The verifier's context holds 40, of which the
    # answer may take 16.
    chat.turns = [("2" * 20, "3" * 20)]
    chat.ask("12+34")
    assert "1 earlier turns are left out: the context is full" in shown.getvalue()
    assert len(chat.turns) == 2


@pytest.mark.parametrize("decoder", ["APD", "ReFusion", "SelfSpeculative"])
def test_answers_are_not_lost_to_a_decoder_that_does_not_fit(masked: Path, decoder: str) -> None:
    prompts, output = masked.parent / "prompts.txt", masked.parent / "answers.jsonl"
    prompts.write_text(QUERY)
    command = ["generate", f"--prompts={prompts}", f"--output={output}", "--max_new_tokens=12"]
    source = ADDITIONS if decoder == "SelfSpeculative" else masked
    assert main([*command, f"--ckpt_path={source}"]) == 0
    text = output.read_text()
    assert main([*command, f"--ckpt_path={source}", f"--decoder={decoder}"]) == 2
    assert output.read_text() == text


def test_the_two_models_may_have_other_types_of_weights() -> None:
    def answer(dtype: DType, others: DType) -> str:
        overrides = BackboneConfig(source=str(ADDITIONS), attention="bidirectional")
        model = refusion_lit.load(ADDITIONS, dtype=dtype, overrides=overrides)
        pair(model, refusion_lit.load(ADDITIONS, dtype=others))
        return model.generate([QUERY], decoder=APD(), max_new_tokens=12)[0].text

    expected = answer("float32", "float32")
    assert answer("float32", "float64") == answer("float64", "float32") == expected
    assert len(answer("bfloat16", "float32")) == len(answer("float32", "bfloat16")) == len(expected) == 12


def test_a_verifier_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(ADDITIONS, other)
    text = (other / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocab = tokenizer["model"]["vocab"]
    first, second = [token for token in vocab if token.isdigit()][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="verifier: expected a model with the same tokenizer"):
        refusion_lit.load(ADDITIONS, verifier=other)


def test_test_takes_a_verifier_and_resumes_with_the_same_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model": {
            "backbone": {"source": str(ADDITIONS), "attention": "bidirectional"},
            "decoders": {"apd": {"class_path": "APD"}},
            "sampling": {"max_new_tokens": 12},
        },
        "data": {
            "task": {"class_path": "Additions", "init_args": {"num_train": 4, "num_validation": 4, "num_test": 3}},
            "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"source": str(ADDITIONS)}},
        },
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(config))
    command = ["test", "--config", str(tmp_path / "test.yaml"), "--runs_dir", str(tmp_path), "--run_version", "one"]
    assert main(command) == 2
    assert "model.decoding.verifier: expected a second model for apd" in capsys.readouterr().err
    command += ["--trainer.accelerator=cpu", "--model.decoding.verifier"]
    assert main([*command, str(ADDITIONS)]) == 0
    [directory] = tmp_path.glob("*/one")
    lines = [json.loads(line) for line in (directory / "predictions_apd.jsonl").read_text().splitlines()]

    masked = refusion_lit.load(
        ADDITIONS, overrides=BackboneConfig(source=str(ADDITIONS), attention="bidirectional"), verifier=ADDITIONS
    )
    examples = Additions(num_train=4, num_validation=4, num_test=3).examples("test")
    rows = masked.generate([e.query for e in examples], ids=[e.id for e in examples], decoder=APD(), max_new_tokens=12)
    assert {line["id"]: line["num_forwards"] for line in lines} == {row.id: row.num_forwards for row in rows}
    assert {line["id"]: line["response"] for line in lines} == {row.id: row.text for row in rows}

    other = tmp_path / "other"
    shutil.copytree(ADDITIONS, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: value * 1.01 for name, value in weights.items()}, other / "model.safetensors")
    resume = ["test", "--resume", str(directory)]
    capsys.readouterr()
    assert main(resume) == 0
    assert "nothing left to do" in capsys.readouterr().err
    assert main([*resume, f"--model.decoding.verifier={other}"]) == 2
    assert re.search(r"verifier was '\w+', is '\w+'", capsys.readouterr().err)
