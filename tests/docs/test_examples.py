"""The examples of the documentation keep what the contract asks of any decoder, objective and task."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.data.batches import collate_responses
from refusion_lit.data.examples import EncodedExample
from refusion_lit.decoding import Decoder, decode
from refusion_lit.noise import KeyedNoise
from refusion_lit.plugins import load_plugins
from refusion_lit.tasks import SPLITS
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.fakes import tiny_backbone
from support.forks import fork, wait
from support.modules import load_module
from support.subclasses import concrete_subclasses

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def load(name: str, cls: str) -> Any:
    return getattr(load_module(EXAMPLES / f"{name}.py"), cls)


def test_the_decoder_answers_with_one_forward_each() -> None:
    prompts = [Prompt(token_ids=(5, 6, 7), id="a"), Prompt(token_ids=(4,), id="b")]
    output = decode(tiny_backbone(), load("one_shot", "OneShot")(), prompts, SamplingParams(max_new_tokens=6))
    assert [row.num_forwards for row in output.rows] == [1, 1]
    assert all(1 <= row.num_tokens <= 6 for row in output.rows)


def test_a_decoder_of_ones_own_file_is_imported_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (EXAMPLES.parent / "extending.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"```console\n(PYTHONPATH=.*)\n```", page)
    setting, _, *args = shlex.split(line)
    shutil.copy(EXAMPLES / "one_shot.py", tmp_path)
    shutil.copytree(EXAMPLES.parents[1] / "tests" / "goldens" / "models" / "additions-clean", tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert "No module named 'one_shot'" in capsys.readouterr().err
    assert setting == "PYTHONPATH=."

    def work() -> int:
        sys.path.insert(0, str(tmp_path))  # as Python does for PYTHONPATH
        sys.stdout = sys.stderr = (tmp_path / "log").open("w", buffering=1)
        return main(args)

    assert wait(fork(work)) == 0
    printed = (tmp_path / "log").read_text()
    assert "12+34=46;56+78=134;" in printed
    assert "20 tokens, 1 forwards" in printed


def test_the_guide_leads_to_the_classes_that_a_decoder_uses() -> None:
    page = (EXAMPLES.parent / "extending.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"\[The API of decoders\]\(api/decoding\.md\) has (.*) in full\.", page)
    api = (EXAMPLES.parent / "api" / "decoding.md").read_text(encoding="utf-8")
    documented = re.findall(r"::: (\S+)", api)
    for name in re.findall(r"`(\w+)`", sentence):
        assert getattr(refusion_lit.decoding, name).__module__ in documented


def test_an_error_in_a_decoder_of_ones_own_names_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "one_shot.py").read_text(encoding="utf-8")
    text = text.replace("class OneShot", "class TooFew").replace("reading.tokens)", "reading.tokens[1:])")
    (tmp_path / "too_few.py").write_text(text, encoding="utf-8")
    line = text.splitlines().index("        state.commit(canvas, reading.tokens[1:])") + 1
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = EXAMPLES.parents[1] / "tests" / "goldens" / "models" / "additions-clean"
    assert main(["generate", "--ckpt_path", str(model), "--decoder", "too_few.TooFew", "--prompt", "1+2>"]) == 2
    assert f"({tmp_path / 'too_few.py'}, line {line})" in capsys.readouterr().err


def test_options_of_the_guide_are_refused_by_name() -> None:
    page = (EXAMPLES.parent / "extending.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "window" in block]
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "extending.md", "exec", dont_inherit=True), scope)
    decoder = scope["MyDecoder"](window=4)
    assert decoder.window == 4
    assert not decoder.requirements().mismatches(ModelTraits(attention="causal", predictions=("mask",)))
    with pytest.raises(ValueError, match=r"^window: expected .* at least 1, got 0"):
        scope["MyDecoder"](window=0)


def test_the_objective_hides_the_ends_of_responses() -> None:
    backbone = tiny_backbone()
    samples = [EncodedExample("a", (5, 6), (7, 8, 1)), EncodedExample("b", (5,), (9, 1))]
    batch = collate_responses(samples, pad_token_id=0)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    objective = load("ending", "Ending")()
    corrupted = objective.corrupt(batch, noise, backbone.special_tokens, mask_ratio=torch.tensor([0.5, 0.5]))
    assert corrupted.is_masked.nonzero().tolist() == [[0, 3], [0, 4], [1, 2]]
    hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)
    loss = objective.loss(hidden, backbone.logits, corrupted)
    losses = [
        -backbone.logits(hidden[i, at]).log_softmax(-1)[token] for i, at, token in ((0, 3, 8), (0, 4, 1), (1, 2, 1))
    ]
    by_hand = torch.stack(losses).mean()
    torch.testing.assert_close(loss.total.to(by_hand.dtype), by_hand)


def test_the_contract_suite_takes_classes_of_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (EXAMPLES.parent / "extending.md").read_text(encoding="utf-8")
    ((module, folder, name),) = re.findall(r"CONTRACT=(\w+) PYTHONPATH=(\S+) pytest tests/contract -k (\w+)\n", page)
    monkeypatch.syspath_prepend(ROOT / folder)
    before = concrete_subclasses(Decoder)
    monkeypatch.setenv("CONTRACT", module)
    assert {cls.__name__ for cls in set(concrete_subclasses(Decoder)) - set(before)} == {name}


def test_a_package_registers_its_decoder_as_the_guide_says(tmp_path: Path) -> None:
    """Models get it by their traits, or by the name in their config."""
    page = (EXAMPLES.parent / "extending.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    [(group, plugins)] = tomllib.loads(block)["project"]["entry-points"].items()
    for name in ("one_shot.py", "one_shot_plugin.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    info = tmp_path / "one_shot_plugin-1.0.dist-info"  # as installing the package makes
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one-shot-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in plugins.items())
    )
    known = {"attention": "causal", "predictions": ["mask", "next_token_in_slot"]}
    entries = (
        known,
        {"attention": "causal", "predictions": ["mask"]},
        known | {"decoder": {"class_path": "OneShot"}},
        known | {"decoder": {"class_path": "one_shot.OneShot"}},
    )
    models = []
    for number, entry in enumerate(entries):
        models.append(str(tmp_path / f"model_{number}"))
        shutil.copytree(ROOT / "tests" / "goldens" / "models" / "additions-clean", models[-1])
        file = Path(models[-1]) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"refusion_lit": entry}))

    def work() -> None:
        sys.path.insert(0, str(tmp_path))
        load_plugins.cache_clear()  # as in a new process
        names = [type(refusion_lit.load(name).default_decoder).__name__ for name in models]
        (tmp_path / "decoders.json").write_text(json.dumps(names))

    assert wait(fork(work)) == 0
    assert json.loads((tmp_path / "decoders.json").read_text()) == ["ReFusion", *["OneShot"] * 3]


def test_the_task_has_splits_of_its_own() -> None:
    task = load("reversal", "Reversal")(num_examples=50)
    queries = [{example.query for example in task.examples(split)} for split in SPLITS]
    assert len(set.union(*queries)) == sum(map(len, queries))
    example = task.examples("test")[0]
    assert task.score(example, example.query[:-1][::-1]) == 1
    assert task.score(example, example.query[:-1]) == 0
