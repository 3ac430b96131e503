"""Arguments and configs are checked before the parser's imports; each error is one line with the nearest right name."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli import main
from refusion_lit.cli.check import check_arguments
from refusion_lit.cli.description import describe
from refusion_lit.cli.generate import build_parser
from refusion_lit.cli.suggestions import edit_distance, nearest
from refusion_lit.cli.trainer_options import COMMANDS, FILE, current_description, read_description


def refusal(command: str, *args: str) -> str:
    """Return the message for arguments that are refused."""
    with pytest.raises(ValueError, match=r".") as refused:
        check_arguments(args, read_description(command), command)
    return str(refused.value)


def test_the_description_is_current() -> None:
    """If this fails, run ``python -m refusion_lit.cli.trainer_options``."""
    stored = json.loads(FILE.read_text())
    if stored["lightning"] != version("lightning"):
        pytest.skip(f"the description is of Lightning {stored['lightning']}")
    assert current_description() == stored


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--precision=16"], "unknown option 'precision'; did you mean 'trainer.precision'?"),
        (["--trainer.max-stepz=3"], "unknown option 'trainer.max-stepz'; did you mean 'trainer.max_steps'?"),
        (["--nothing_like_it=3"], "unknown option 'nothing_like_it'; `refusion-lit fit --help` lists them"),
        (["--data.batch_size"], "data.batch_size: expected a value, got none; write --data.batch_size VALUE."),
        (
            ["--data.batch_size=many"],
            "data.batch_size: expected an integer, got 'many'; set it to such a value, for example 32 (the default).",
        ),
        (["--data.batch_size=1.5"], "data.batch_size: expected an integer, got 1.5; set it to such a value"),
        (["--model.seed=null"], "model.seed: expected an integer, got None; set it to such a value"),
        (["--data.malformed=ignore"], "data.malformed: expected error or skip, got 'ignore'; set it to such a value"),
        (
            ["--data.length_grouped=maybe"],
            "data.length_grouped: expected true or false, got 'maybe'; set it to such a value",
        ),
        (["--data.task.num_tran=3"], "unknown option 'data.task.num_tran'; did you mean 'data.task.num_train'?"),
        (["--data.task=Additoins"], "got 'Additoins'; did you mean 'Additions'?"),
        (["--data.task=Hybrid"], "got 'Hybrid'; choose one of Additions, Gsm8k,"),
        (
            ["--data.task=no_such_package.Task"],
            "(no module 'no_such_package'); install the module or correct its name.",
        ),
        (
            ["--data.task=no.yaml"],
            "data.task: expected a class or a YAML file, got no.yaml, which does not exist; correct it.",
        ),
        (["--model.decoders.refusion.slot_sise=4"], "did you mean 'model.decoders.refusion.slot_size'?"),
        (
            ["--model.decoders={a: {class_path: ReFusion, init_args: {k: x}}}"],
            "model.decoders.a.k: expected an integer",
        ),
        (["--model.decoders.a=Autoregressive", "--model.decoders.a.slot_size=4"], "'model.decoders.a.slot_size'"),
        (
            ["--config=none.yaml"],
            "config: expected a YAML file, got none.yaml (No such file or directory); check the path.",
        ),
        (
            ["stray"],
            "expected options, which start with -- as in --config FILE, got 'stray'; remove it or write --NAME",
        ),
    ],
)
def test_wrong_arguments(args: list[str], expected: str) -> None:
    assert expected in refusal("fit", "--config", QUICKSTART, *args)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"modle": {}}, "unknown option 'modle'; did you mean 'model'?"),
        ({"model": {"samplin": {}}}, "unknown option 'model.samplin'; did you mean 'model.sampling'?"),
        ({"model": {"sampling": {"max_new_tokns": 3}}}, "did you mean 'model.sampling.max_new_tokens'?"),
        ({"data": {"batch_size": "x"}}, "data.batch_size: expected an integer, got 'x'; set it to such a value"),
        ({"data": {"task": {"class_path": "Gsm8k", "init_args": {"tset": "x"}}}}, "did you mean 'data.task.test'?"),
        ({"model": {"decoders": {"a": {"class_path": "ReFuson"}}}}, "model.decoders.a: expected"),
        (
            {"trainer.max_epochs": "x"},
            "trainer.max_epochs: expected an integer or null, got 'x'; set it to such a value.",
        ),
    ],
)
def test_wrong_configs_are_named(config: dict[str, object], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    message = refusal("fit", "--config", QUICKSTART, "--config", str(file))
    assert message.startswith(f"{file}: ")
    assert expected in message


def test_what_is_required_may_come_from_a_config() -> None:
    assert refusal("fit").startswith("data.task: expected a value, got none; give it, or a config")
    check_arguments(["--config", QUICKSTART], read_description("fit"), "fit")
    check_arguments(["--data.task=Additions", "--data.tokenizer=CharacterTokenizer"], read_description("fit"), "fit")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_pass(command: str, config: Path) -> None:
    check_arguments(["--config", str(config)], read_description(command), command)


@pytest.mark.parametrize(
    "args",
    [
        TINY,
        ["--data.task=HumanEval", "--data.task.files=x.jsonl"],
        ["--data.task.files=x.jsonl", "--data.task=HumanEval"],
        ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=1e-3"],
        ["--model.objective=json.JSONDecoder", "--model.objective.anything=1"],  # from another package: unknown
        ["--trainer.callbacks=[{class_path: ModelCheckpoint, init_args: {save_last: true}}]"],
        ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=step"],
        ["--trainer.precision", "bf16-mixed", "--trainer.devices", "[0, 1]", "--trainer.strategy=ddp"],
        ["--model.decoders.new=configs/decoder/llada.yaml", "--model.decoders.new.steps=3"],
        ["--model.sampling.stop=[a, b]", "--model.sampling.top_k=null", "--model.sampling.temperature=1e-1"],
        ["--print_config", "--seed_everything=true", "-c", QUICKSTART],
    ],
)
def test_what_the_parser_takes_passes(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    check_arguments(["--config", QUICKSTART, *args], read_description("fit"), "fit")


def test_another_version_of_lightning_leaves_its_options_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refusion_lit.cli.trainer_options.version", lambda name: "0.0")
    args = ["--config", QUICKSTART, "--trainer.from_the_future=3"]
    check_arguments(args, read_description("fit"), "fit")
    assert "did you mean 'data.batch_size'" in refusal("fit", *args, "--data.batchsize=3")


def test_a_parser_is_described_with_its_components() -> None:
    description = describe(build_parser())
    with pytest.raises(ValueError, match=r"unknown option 'decoder\.slot_sise'; did you mean 'decoder\.slot_size'"):
        check_arguments(["--ckpt_path=x", "--decoder.slot_sise=3"], description, "generate")
    with pytest.raises(ValueError, match=r"unknown option 'decoder\.slot_size'; known are"):
        check_arguments(["--ckpt_path=x", "--decoder.slot_size=3", "--decoder=LLaDA"], description, "generate")
    with pytest.raises(ValueError, match=r"unknown option 'config'"):
        check_arguments(["--ckpt_path=x", "--config=x.yaml"], description, "generate")


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("fitt", ["fit", "test"], "; did you mean 'fit'?"),
        ("tset", ["fit", "test"], "; did you mean 'test'?"),
        ("trian", ["trace", "fit"], ""),
        ("precision", ["revision"], ""),
        ("max-new-tokens", ["max_new_tokens"], "; did you mean 'max_new_tokens'?"),
        ("precision", ["revision", "trainer.precision"], "; did you mean 'trainer.precision'?"),
        ("max_new_tokns", ["max_new_tokens", "max_steps"], "; did you mean 'max_new_tokens'?"),
        ("x", ["k"], ""),
    ],
)
def test_the_nearest_name_is_suggested_or_none(word: str, known: list[str], expected: str) -> None:
    assert nearest(word, known) == expected


@pytest.mark.parametrize(
    ("first", "second", "edits"),
    [("", "abc", 3), ("kitten", "sitting", 3), ("ab", "ba", 1), ("abc", "abc", 0), ("precision", "revision", 2)],
)
def test_edits_are_counted(first: str, second: str, edits: int) -> None:
    assert edit_distance(first, second) == edit_distance(second, first) == edits


def test_an_argument_without_dashes_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import-gguf", "--help"])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "usage: refusion-lit import-gguf --output TEXT [--OPTION VALUE ...] FILE"
    assert "--file" not in shown


@pytest.mark.parametrize(
    "args",
    [
        *([command, "--help"] for command in (*COMMANDS, "generate", "chat", "trace", "score", "sweep", "report")),
        ["fit", "--config", QUICKSTART, "--precision=16"],
        ["generate", "--ckpt_path=x", "--promt=1"],
        ["generate", "--ckpt_path=x", "--prompt=1", "--decoder.slot_threshold=1.5"],
        ["sweep", "--config=none.yaml"],
        ["trian"],
    ],
    ids=" ".join,
)
def test_help_and_usage_errors_import_nothing_heavy(args: list[str]) -> None:
    program = (
        "import sys\nfrom refusion_lit.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'lightning', 'transformers', 'matplotlib', 'numpy'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "set()", done.stderr
