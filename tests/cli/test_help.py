"""Help is what jsonargparse prints; commands without a model start without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from refusion_lit.cli import COMMANDS, TRAINER_COMMANDS, main
from support.forks import run_in_new_process

PROGRAM = """
import sys
from refusion_lit.cli import main
main(sys.argv[1:])
print(*{"torch", "lightning", "transformers"} & sys.modules.keys(), file=sys.stderr)
"""


def list_imports(*args: str) -> set[str]:
    """Return the slow packages that a command imports."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, timeout=300)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("command", [*TRAINER_COMMANDS, *COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    assert f" {command} " in shown.splitlines()[0]


@pytest.mark.parametrize("command", ["generate", "chat", "trace", "serve", "evaluate"])
def test_commands_with_a_model_have_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    options = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")}
    assert {"--ckpt_path", "--dtype", "--device", "--decoder"} <= options


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["report", "--help"], ["init", "--help"], ["sweep", "--help"]], ids=" ".join
)
def test_commands_without_a_model_import_nothing_slow(args: list[str]) -> None:
    assert list_imports(*args) == set()


def test_a_wrong_sweep_is_refused_before_slow_imports(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("gird: {a: [1]}\n")
    assert list_imports("sweep", f"--config={tmp_path / 'sweep.yaml'}") == set()


def test_commands_without_a_trainer_do_not_import_lightning(tmp_path: Path) -> None:
    modules = {place.partition(".")[0] for place in COMMANDS.values()}
    imports = "; ".join(f"import refusion_lit.cli.{module}" for module in sorted(modules))
    program = f"""
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
    del sys.modules[name]
{imports}
print({{"lightning"}} & sys.modules.keys())
"""
    assert run_in_new_process(program, tmp_path) == "set()\n"


def test_the_help_of_a_training_has_one_way_to_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    shown = capsys.readouterr().out
    options = {word for line in shown.splitlines() for word in line.split()[:1] if word.startswith("--")}
    assert {"--model.optimizer", "--ckpt_path", "--data.batch_size", "--trainer.max_steps"} <= options
    assert "--optimizer" not in options
    assert "--resume" in shown


@pytest.mark.parametrize(
    "args", ["--decoder.help ReFusion", "--decoder.help=ReFusion --prompt x", "--decoder.help ReFusion --prompt=x"]
)
def test_the_options_of_a_class_are_shown(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *args.split()]) == 0
    assert "--decoder.slot_size" in capsys.readouterr().out
