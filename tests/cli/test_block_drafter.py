"""A block drafter (DFlash) from training to text, by the commands that a user runs, and in transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.block_drafter import BlockDrafterOptions
from refusion_lit.modeling.load import BackboneConfig
from support.drafter_runs import NUM_STEPS, QUERIES, train, write_config
from support.forks import run_without_us

BLOCK_SIZE = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, base: Path) -> str:
    """Train a block drafter."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"block_size": BLOCK_SIZE, "num_layers": 2, "target_layer_ids": [0, 2]}
    backbone = {"source": str(base), "block_drafter": options}
    config = write_config(folder / "fit.yaml", {"class_path": "BlockDraft"}, NUM_STEPS, **backbone)
    return str(train(folder, config) / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def draft(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the drafter alone."""
    output = tmp_path_factory.mktemp("export") / "draft"
    assert main(["export", "--ckpt_path", checkpoint, "--adapter_only=true", "--output", str(output)]) == 0
    return output


def rows(model: refusion_lit.TextModel, decoder: Any = None, **options: Any) -> list[Any]:
    return model.generate(QUERIES, decoder=decoder, max_new_tokens=24, **options)


def test_training_leaves_the_model_alone(checkpoint: str, base: Path) -> None:
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, weight in load_file(base / "model.safetensors").items():
        assert torch.equal(weights[f"backbone.model.{name}"], weight), name


def test_training_raises_the_number_of_accepted_drafts_and_changes_no_text(
    checkpoint: str, draft: Path, base: Path
) -> None:
    expected = rows(refusion_lit.load(base), Autoregressive())
    untrained = BackboneConfig(source=str(base), block_drafter=BlockDrafterOptions(block_size=BLOCK_SIZE, num_layers=2))
    model = refusion_lit.load(base)
    model.backbone = untrained.build(model.tokenizer, seed=0)
    texts = {
        "untrained": rows(model), "trained": rows(refusion_lit.load(checkpoint)),
        "exported": rows(refusion_lit.load(base, draft=draft)),
    }  # fmt: skip
    for name, generations in texts.items():
        assert [row.token_ids for row in generations] == [row.token_ids for row in expected], name
    forwards = {name: sum(row.num_forwards for row in generations) for name, generations in texts.items()}
    assert forwards["exported"] == forwards["trained"]
    assert forwards["trained"] < 0.9 * forwards["untrained"]


def record_candidates(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which transformers' drafter adds the drafts of every step."""
    candidates: list[list[int]] = []
    get_candidates: Any = DFlashTokenCandidateGenerator.get_candidates

    def record(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids, scores = get_candidates(self, input_ids, *args, **kwargs)
        if scores is not None:
            candidates.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, scores

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", record)
    return candidates


@pytest.mark.parametrize("layout", ["alone", "whole"])
def test_transformers_drafts_and_verifies_what_we_do(
    layout: str, checkpoint: str, draft: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal candidates in every step, texts and numbers of forwards."""
    target, assistant = base, draft
    if layout == "whole":
        target, assistant = tmp_path / "model", tmp_path / "model" / "drafter"
        assert main(["export", "--ckpt_path", checkpoint, "--output", str(target)]) == 0
    ours = rows(refusion_lit.load(base, draft=draft) if layout == "alone" else refusion_lit.load(target), trace=True)
    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    count_forward = mock.Mock(return_value=None)
    model.get_decoder().register_forward_pre_hook(count_forward)
    candidates = record_candidates(monkeypatch)
    loaded = refusion_lit.load(base)
    for query, row in zip(QUERIES, ours, strict=True):
        prompt = torch.tensor([loaded.encode(query)])
        count_forward.reset_mock()
        candidates.clear()
        options = {"speculation_type": "dflash", "do_sample": False, "max_new_tokens": 24}
        output = model.generate(prompt, assistant_model=AutoModel.from_pretrained(assistant).eval(), **options)
        end = prompt.shape[1] + len(row.token_ids)
        assert output[0, prompt.shape[1] : end].tolist() == row.token_ids
        assert count_forward.call_count == row.num_forwards
        assert len(candidates) == row.num_drafter_forwards
        # The tokens of a forward pass end with the drafts, a block without its first token.
        assert candidates == [entry.tokens[1 - BLOCK_SIZE :] for entry in row.trace][: len(candidates)]


@pytest.mark.parametrize("layout", ["alone", "whole"])
def test_the_cards_program_runs_with_transformers_alone(
    layout: str, checkpoint: str, draft: Path, base: Path, tmp_path: Path
) -> None:
    folder = draft
    if layout == "whole":
        folder = tmp_path / "model"
        assert main(["export", "--ckpt_path", checkpoint, "--output", str(folder)]) == 0
    expected = refusion_lit.load(base).generate(QUERIES[:1], decoder=Autoregressive(), max_new_tokens=64)[0].text
    (program,) = re.findall(r"```python\n(from transformers .*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert "dflash" in program
    assert run_without_us(program.replace("...", QUERIES[0]), tmp_path).strip() == expected.strip()


def test_a_drafter_is_trained_further(draft: Path, base: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "fit.yaml", {"class_path": "BlockDraft"}, 1, source=str(base), draft=str(draft))
    output = tmp_path / "draft"
    checkpoint = train(tmp_path, config) / "checkpoints" / "last.ckpt"
    assert main(["export", "--ckpt_path", str(checkpoint), "--adapter_only=true", "--output", str(output)]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (draft, output))
    assert main(["validate", "--config", config, "--ckpt_path", str(checkpoint), f"--runs_dir={tmp_path}"]) == 0
    change = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < change < 0.02  # one step of the optimizer, not another start


def test_commands_take_a_drafter(
    checkpoint: str, draft: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--ckpt_path", str(base), "--max_new_tokens", "24", "--prompt", QUERIES[0]]
    assert main(["generate", *options, "--decoder", "Autoregressive"]) == 0
    expected = capsys.readouterr().out
    for more in (["--draft", str(draft)], ["--draft", str(draft), "--decoder.num_drafts", "2"]):
        assert main(["generate", *options, *more]) == 0
        assert capsys.readouterr().out == expected
    assert main(["generate", "--ckpt_path", checkpoint, *options[2:]]) == 0
    assert capsys.readouterr().out == expected
    output = tmp_path / "trace.json"
    assert main(["trace", *options, "--draft", str(draft), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["trace"]["decoder"] == "SelfSpeculative"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--draft", "DRAFT", "--decoder.layout", "single_forward"], "layout: expected two_forwards"),
        (["--ckpt_path", "DRAFT"], "which is a drafter"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    command: list[str], message: str, draft: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(draft) if option == "DRAFT" else option for option in command]
    assert main(["generate", "--ckpt_path", str(base), "--prompt", "1+2>", *given]) == 2
    assert message in capsys.readouterr().err


def test_an_objective_with_the_other_kind_of_drafter_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = {"GatedDraft": {"block_drafter": {"num_layers": 1}}, "BlockDraft": {"drafter": {"num_masks": 2}}}
    for objective, drafter in pairs.items():
        config = write_config(tmp_path / "fit.yaml", {"class_path": objective}, 1, source=str(base), **drafter)
        assert main(["fit", "--config", config, f"--runs_dir={tmp_path}", f"--run_version={objective}"]) == 2
        assert "objective: expected a model with a" in capsys.readouterr().err


def damage(path: Path, name: str) -> None:
    """Damage a drafter's directory."""
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    changes: dict[str, dict[str, Any]] = {
        "hidden size": {"hidden_size": 64}, "layers of the model": {"target_layer_ids": [0, 3]},
        "no layers of the model": {"target_layer_ids": []}, "vocabulary": {"mask_token_id": 99_999},
        "missing layer": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        "types": {"layer_types": ["x"]}, "block": {"block_size": 1}, "not a number": {"hidden_size": "x"},
    }  # fmt: skip
    if name in changes:
        (path / "config.json").write_text(json.dumps(config | changes[name]))
    elif name == "missing tensor":
        save_file({k: v for k, v in weights.items() if k != "encoder.fc.weight"}, path / "model.safetensors")
    elif name == "no weights":
        (path / "model.safetensors").unlink()
    elif name == "weights outside":
        (path / "model.safetensors").rename(path.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../outside.safetensors")}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "cut weights":
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:1000])
    elif name == "tokenizer":
        values = json.loads((path / "tokenizer.json").read_text())
        values["model"]["vocab"]["+"], values["model"]["vocab"]["="] = 11, 10
        values["model"]["vocab"] = {token: (n + 1) % 12 for token, n in values["model"]["vocab"].items()}
        (path / "tokenizer.json").write_text(json.dumps(values))
    elif name == "other model":
        entry = {"base": "another", "base_weights": "0" * 16}
        (path / "config.json").write_text(json.dumps(config | {"refusion_lit": entry}))
    elif name == "text":
        (path / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    "name",
    [
        "hidden size", "layers of the model", "no layers of the model", "vocabulary", "missing layer", "types", "block",
        "not a number", "missing tensor", "no weights", "weights outside", "cut weights", "tokenizer",
        "other model", "text",
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused_in_a_line(
    name: str, draft: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read, where files other than weights say so."""
    path = tmp_path / "draft"
    shutil.copytree(draft, path)
    damage(path, name)
    if name != "other model":
        monkeypatch.setattr("refusion_lit.modeling.load.load_weights", None)
    with pytest.raises(ValueError, match=r"^draft: [^\n]+\.$"):
        refusion_lit.load(base, draft=path)


def test_more_layers_than_any_drafter_has_are_refused_before_transformers_lists_them(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "muse_glimmer_assistant", "num_hidden_layers": 20000}')
    with pytest.raises(ValueError, match=r"^draft: .*: num_hidden_layers: expected at most"):
        refusion_lit.load(base, draft=tmp_path)


def test_a_config_of_the_drafter_with_unknown_options_is_refused(base: Path) -> None:
    model = refusion_lit.load(base)
    options = BlockDrafterOptions(config={"widths": 3})
    with pytest.raises(ValueError, match=r"^backbone\.block_drafter\.config: expected"):
        BackboneConfig(source=str(base), block_drafter=options).build(model.tokenizer)
