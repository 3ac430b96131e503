"""A drafter from training to text, by the commands that a user runs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive, SelfSpeculative
from refusion_lit.modeling.drafter import Drafter, DrafterOptions
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.saving import save_drafter
from support.drafter_runs import ADDITIONS, NUM_STEPS, QUERIES, train, write_config
from support.forks import run_without_us
from support.tiny import make_base, make_sampling


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Train a drafter; return the run's directory."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"source": str(base), "drafter": {"num_masks": 3, "rank": 4, "alpha": 8.0}}
    return train(folder, write_config(folder / "fit.yaml", {"class_path": "GatedDraft"}, NUM_STEPS, **options))


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> str:
    return str(run / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def draft(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the drafter alone."""
    output = tmp_path_factory.mktemp("export") / "draft"
    assert main(["export", "--ckpt_path", checkpoint, "--adapter_only=true", "--output", str(output)]) == 0
    return output


def texts(model: refusion_lit.TextModel, decoder: Any) -> list[tuple[str, int]]:
    rows = model.generate(QUERIES, decoder=decoder, max_new_tokens=24, batch_size=1)  # a batch starts without drafts
    return [(row.text, row.num_forwards) for row in rows]


def test_training_lowers_the_loss_and_leaves_the_model_alone(run: Path, checkpoint: str, base: Path) -> None:
    with (run / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, weight in load_file(base / "model.safetensors").items():
        assert torch.equal(weights[f"backbone.model.{name}"], weight), name


def test_the_text_is_the_models_own_in_fewer_forwards(checkpoint: str, draft: Path, base: Path) -> None:
    expected = texts(refusion_lit.load(base), Autoregressive())
    trained = texts(refusion_lit.load(checkpoint), SelfSpeculative())
    exported = texts(refusion_lit.load(base, draft=draft), SelfSpeculative())
    assert [text for text, _ in trained] == [text for text, _ in expected] == [text for text, _ in exported]
    assert sum(n for _, n in trained) < sum(n for _, n in expected)


# Decodes prompts by the program of a drafter, and prints their tokens and numbers of forward passes. Then calls the
# program with changed layers, and prints its error.
TRANSFORMERS_ALONE = """
import json, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(base).eval()
calls = []
model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
for prompt in prompts:
    output = model.generate(
        torch.tensor([prompt]), custom_generate=draft, trust_remote_code=True, draft=draft, max_new_tokens=24
    )
    print(json.dumps([output[0, len(prompt):].tolist(), len(calls)]))
    calls.clear()
next(model.get_decoder().layers.parameters()).data.neg_()
try:
    model.generate(torch.tensor([prompts[0]]), custom_generate=draft, trust_remote_code=True, draft=draft)
except ValueError as error:
    print(json.dumps(str(error)))
"""


def check_alone(base: Path, draft: Path, folder: Path) -> None:
    """Check what the drafter's program decodes with the library's copy of the base; it refuses other layers."""
    model = refusion_lit.load(base, draft=draft)
    prompts = [model.encode(query) for query in QUERIES]
    given = f"base, draft, prompts = {str(base)!r}, {str(draft)!r}, {prompts}\n"
    *generations, refused = [
        json.loads(line) for line in run_without_us(given + TRANSFORMERS_ALONE, folder).splitlines()
    ]
    rows = model.generate(QUERIES, decoder=SelfSpeculative(layout="two_forwards"), max_new_tokens=24)
    assert generations == [[r.token_ids, r.num_forwards] for r in rows]
    assert "which is another model's; give its own." in refused
    assert [row.token_ids for row in rows] == [
        row.token_ids for row in model.generate(QUERIES, decoder=Autoregressive(), max_new_tokens=24)
    ]


def test_a_drafter_brings_its_decoder_along(draft: Path, base: Path, tmp_path: Path) -> None:
    check_alone(base, draft, tmp_path)


def test_a_drafter_fits_a_base_to_which_we_add_a_mask_token(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "0123456789+,=;>", max_positions=256)
    model: Any = refusion_lit.load(base).backbone.model
    library: Any = AutoModelForCausalLM.from_pretrained(base)
    assert model.get_input_embeddings().num_embeddings == library.get_input_embeddings().num_embeddings + 1
    (tmp_path / "draft").mkdir()
    drafter = Drafter(model.get_decoder(), DrafterOptions(num_masks=2, rank=2), str(base))
    save_drafter(drafter, model.get_decoder(), tmp_path / "draft", vocab_size=16)
    check_alone(base, tmp_path / "draft", tmp_path)


@pytest.mark.parametrize("samples", [False, True])
def test_the_cards_program_runs_with_transformers_alone(draft: Path, base: Path, tmp_path: Path, samples: bool) -> None:
    expected = refusion_lit.load(base).generate(QUERIES[:1], decoder=Autoregressive(), max_new_tokens=64)[0].text
    (program,) = re.findall(r"```python\n(from transformers .*?)```", (draft / "README.md").read_text(), re.DOTALL)
    if samples:
        program = program.replace(str(base), str(make_sampling(base, tmp_path / "base")))
    assert run_without_us(program.replace("...", QUERIES[0]), tmp_path).strip() == expected.strip()


def test_chat_takes_a_drafter(
    draft: Path, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for options in (["--decoder", "Autoregressive"], ["--draft", str(draft)]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUERIES[0]}\n"))
        assert main(["chat", "--ckpt_path", str(base), "--max_new_tokens", "24", *options]) == 0
        shown.append(capsys.readouterr().out)
    (text, num_exact), (same, num_drafted) = (
        (out.splitlines()[0], int(re.findall(r"(\d+) forwards", out)[0])) for out in shown
    )
    assert text == same
    assert num_drafted < num_exact


def test_generate_and_trace_take_a_drafter(
    draft: Path, base: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--ckpt_path", str(base), "--max_new_tokens", "24"]
    assert main(["generate", *options, "--prompt", QUERIES[0], "--decoder", "Autoregressive"]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", *options, "--prompt", QUERIES[0], "--draft", str(draft)]) == 0
    assert capsys.readouterr().out == expected
    changed = ["--decoder.layout", "two_forwards"]
    assert main(["generate", *options, "--prompt", QUERIES[0], "--draft", str(draft), *changed]) == 0
    assert capsys.readouterr().out == expected
    output = tmp_path / "trace.json"
    assert main(["trace", *options, "--prompt", QUERIES[0], "--draft", str(draft), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["trace"]["decoder"] == "SelfSpeculative"


def test_a_wrong_base_is_refused(draft: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--ckpt_path", str(ADDITIONS), "--draft", str(draft), "--prompt", "1+2>"]) == 2
    message = capsys.readouterr().err
    assert "expected the model of" in message
    assert str(base) in message


def test_a_drafter_is_trained_further(draft: Path, base: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "fit.yaml", {"class_path": "GatedDraft"}, 1, source=str(base), draft=str(draft))
    output = tmp_path / "draft"
    checkpoint = train(tmp_path, config) / "checkpoints" / "last.ckpt"
    assert main(["export", "--ckpt_path", str(checkpoint), "--adapter_only=true", "--output", str(output)]) == 0
    before, after = (load_file(path / "drafter.safetensors") for path in (draft, output))
    assert main(["validate", "--config", config, "--ckpt_path", str(checkpoint), f"--runs_dir={tmp_path}"]) == 0
    change = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < change < 0.02  # one step of the optimizer, not another start


def test_a_drafter_is_new_or_trained_further(draft: Path) -> None:
    with pytest.raises(ValueError, match=r"got .drafter and draft."):
        BackboneConfig(source="model", drafter=DrafterOptions(), draft=str(draft))


def test_a_model_without_drafter_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ckpt_path", str(base), "--decoder", "SelfSpeculative"]
    assert main(["generate", *options, "--prompt", "1+2>"]) == 2
    assert "--draft" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "text", "options", "kind", "sizes", "shapes", "weights"])
def test_damaged_drafters_are_refused(draft: Path, base: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "draft"
    shutil.copytree(draft, path)
    options = json.loads((path / "drafter.json").read_text())
    if damage == "missing":
        (path / "drafter.json").unlink()
    elif damage == "text":
        (path / "drafter.json").write_text("{")
    elif damage == "options":
        (path / "drafter.json").write_text(json.dumps({**options, "options": {"num_masks": "x"}}))
    elif damage == "kind":
        (path / "drafter.json").write_text(json.dumps({**options, "options": {"block_size": 4}}))
    elif damage == "sizes":  # for which no memory is large enough
        (path / "drafter.json").write_text(json.dumps({**options, "options": {"num_masks": 1 << 50, "rank": 1 << 40}}))
    elif damage == "shapes":
        save_file({"masks": torch.zeros(3, 96)}, path / "drafter.safetensors")
    else:
        (path / "drafter.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="draft: expected"):
        refusion_lit.load(base, draft=path)
    with pytest.raises(ValueError, match="draft: expected the path"):
        refusion_lit.load(base, draft=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["checkpoint", "base and draft", "base that samples and draft"])
def test_a_whole_export_is_the_model_with_its_drafter(
    source: str, checkpoint: str, base: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    given = ["--ckpt_path", str(base), "--draft", str(draft)]
    if source == "checkpoint":
        given = ["--ckpt_path", checkpoint]
    elif "samples" in source:
        given[1] = str(make_sampling(base, tmp_path / "base"))
    # The drafter would not be used with another decoder.
    assert main(["export", *given, "--output", str(folder), "--decoder=Autoregressive"]) == 2
    expected_error = "decoder: expected SelfSpeculative for a model with a drafter, got 'Autoregressive'"
    assert expected_error in capsys.readouterr().err
    assert main(["export", *given, "--output", str(folder)]) == 0
    weights = load_file(folder / "model.safetensors")
    original = load_file(base / "model.safetensors")
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)
    expected = texts(refusion_lit.load(base, draft=draft), SelfSpeculative())
    assert texts(refusion_lit.load(folder), None) == expected
    (program,) = re.findall(r"```python\n(from transformers .*?)```", (folder / "README.md").read_text(), re.DOTALL)
    whole = refusion_lit.load(base).generate(QUERIES[:1], decoder=Autoregressive(), max_new_tokens=64)[0].text
    assert run_without_us(program.replace("...", QUERIES[0]), tmp_path).strip() == whole.strip()


def test_a_directory_with_its_own_drafter_is_tested_with_it(run: Path, checkpoint: str, tmp_path: Path) -> None:
    """The config of a drafter's training would put a new drafter on the model."""
    assert main(["export", "--ckpt_path", checkpoint, "--output", str(tmp_path / "model")]) == 0
    actual = []
    for source in (checkpoint, str(tmp_path / "model")):
        args = ["test", "--config", str(run / "config.yaml"), "--ckpt_path", source, f"--runs_dir={tmp_path}"]
        assert main([*args, f"--run_name={len(actual)}", "--model.sampling.max_new_tokens=24"]) == 0
        results = json.loads((tmp_path / str(len(actual)) / "version_0" / "results.json").read_text())
        (figures,) = results["results"].values()
        actual.append((figures["num_forwards"], figures["num_tokens"]))
    assert actual[0] == actual[1]


def test_a_drafter_is_no_model(draft: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"--ckpt_path={draft}", "--prompt=1"]) == 2
    assert f"got '{draft}, which is a drafter'" in capsys.readouterr().err
    options = ["--ckpt_path", checkpoint, "--output=new", "--adapter_only=true", f"--draft={draft}"]
    assert main(["export", *options]) == 2
    assert "draft: expected none with --adapter_only" in capsys.readouterr().err


@pytest.mark.parametrize("number", [1, 3])
def test_a_drafter_in_another_format_is_refused(draft: Path, base: Path, tmp_path: Path, number: int) -> None:
    shutil.copytree(draft, tmp_path / "draft")
    values = json.loads((draft / "drafter.json").read_text())
    (tmp_path / "draft" / "drafter.json").write_text(json.dumps(values | {"format": number}))
    with pytest.raises(ValueError, match=r"^draft: expected a drafter in format 2, got .*"):
        refusion_lit.load(base, draft=tmp_path / "draft")
