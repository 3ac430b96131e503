"""A causal model that nobody has trained for masks is decoded one token per forward, and every command says so."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest

import refusion_lit
from cli.conftest import QUICKSTART, TINY_TEST
from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive, ReFusion
from refusion_lit.engine.checks import ModelMismatchError
from refusion_lit.traces.document import read_trace
from support.forks import run_without_us
from support.tiny import make_base, make_sampling

LENGTH = "--max_new_tokens=6"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a causal model whose tokenizer has no mask token."""
    path = tmp_path_factory.mktemp("plain") / "model"
    make_base(path, "abcdefghij 0123456789+,=;>")
    return str(path)


def test_its_own_decoder_is_autoregressive_and_others_are_refused(plain: str) -> None:
    model = refusion_lit.load(plain)
    assert model.default_decoder == Autoregressive()
    [row] = model.generate(["ab"], max_new_tokens=6)
    assert row.num_forwards == row.num_tokens
    message = r"ReFusion does not fit this model: it needs the predictions mask, .* Autoregressive fits\."
    with pytest.raises(ModelMismatchError, match=message):
        model.generate(["ab"], decoder=ReFusion(slot_size=2), max_new_tokens=6)
    with pytest.warns(UserWarning, match="ReFusion does not fit"):
        model.generate(["ab"], decoder=ReFusion(slot_size=2), max_new_tokens=6, allow_mismatch=True)


def test_an_eos_token_that_is_named_as_a_mask_is_none(plain: str, tmp_path: Path) -> None:
    named = shutil.copytree(plain, tmp_path / "named")
    config = json.loads((named / "tokenizer_config.json").read_text())
    (named / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": config["eos_token"]}))
    model = refusion_lit.load(named)
    assert model.backbone.special_tokens.mask_token_id in model.backbone.special_tokens.eos_token_ids
    assert model.default_decoder == Autoregressive()
    expected = refusion_lit.load(plain).generate(["ab"], max_new_tokens=6)[0]
    assert model.generate(["ab"], max_new_tokens=6)[0].token_ids == expected.token_ids


@pytest.mark.parametrize("decoder", ["ReFusion", "LLaDA", "WeDLM", "SelfSpeculative"])
def test_generate_refuses_before_work_starts(plain: str, tmp_path: Path, decoder: str) -> None:
    output = tmp_path / "out.jsonl"
    args = ["generate", f"--ckpt_path={plain}", "--prompt=ab", f"--decoder={decoder}", f"--output={output}", LENGTH]
    assert main(args) == 2
    assert not output.exists()


def test_every_command_names_the_decoder(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    assert main(["generate", f"--ckpt_path={plain}", "--prompt=ab", LENGTH]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("Autoregressive: ")
    assert main(["generate", f"--ckpt_path={plain}", "--prompt=ab", LENGTH, f"--output={output}"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("Autoregressive: 1 answers, ")
    assert json.loads(output.read_text())["decoder"] == "Autoregressive"
    monkeypatch.chdir(tmp_path)
    assert main(["trace", f"--ckpt_path={plain}", "--prompt=ab", LENGTH, "--output=trace.json"]) == 0
    assert capsys.readouterr().out.startswith("decoder: Autoregressive\n")
    assert read_trace("trace.json").decoder == "Autoregressive"
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n/quit\n"))
    assert main(["chat", f"--ckpt_path={plain}", LENGTH]) == 0
    assert "decoder: Autoregressive\n" in capsys.readouterr().err
    run = ["--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={plain}", "--model.decoders=null", "--runs_dir=runs"]
    assert main(["predict", *run]) == 0
    path = Path("runs/quickstart/version_0/predictions.jsonl")
    assert capsys.readouterr().out.splitlines()[-1] == f"Autoregressive: {path}"
    assert json.loads(path.read_text().splitlines()[0])["decoder"] == "Autoregressive"
    assert main(["test", *run, "--model.decoders={mine: Autoregressive}"]) == 0
    assert "mine (Autoregressive)" in capsys.readouterr().out


@pytest.mark.parametrize("template", ["prompt template", "chat template"])
def test_the_cards_program_of_an_export_gives_the_models_own_text(plain: str, tmp_path: Path, template: str) -> None:
    source = make_sampling(Path(plain), tmp_path / "source")
    if template == "chat template":
        (source / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}>")
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"refusion_lit": {"prompt_template": "{query}>"}}))
    assert main(["export", f"--ckpt_path={source}", f"--output={tmp_path / 'out'}"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    (program,) = re.findall(r"```python\n(from transformers .*?)```", card, re.DOTALL)
    expected = refusion_lit.load(plain).generate(["ab>"], max_new_tokens=64)[0].text
    assert expected != refusion_lit.load(plain).generate(["ab"], max_new_tokens=64)[0].text
    assert run_without_us(program.replace("...", "ab"), tmp_path).strip() == expected.strip()
