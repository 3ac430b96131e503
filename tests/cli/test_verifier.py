"""A verifier for APD, by the command line and from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import APD, decode
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.modeling.paired import PairedModel
from refusion_lit.types import Prompt, SamplingParams

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


def test_a_verifier_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(ADDITIONS, other)
    text = (other / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocab = tokenizer["model"]["vocab"]
    first, second = [token for token in vocab if token.isdigit()][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="verifier: expected a model with the tokenizer"):
        refusion_lit.load(ADDITIONS, verifier=other)
