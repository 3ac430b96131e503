"""Help is text in the package: what jsonargparse renders, shown without slow imports."""

from __future__ import annotations

import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cli.conftest import REPOSITORY
from refusion_lit.cli import OWN, main

PAGES = REPOSITORY / "src" / "refusion_lit" / "cli" / "help"
TRAINER = ("fit", "validate", "test", "predict")
PROGRAM = """
import sys
from refusion_lit.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print({"torch", "lightning", "transformers", "jsonargparse", "numpy"} & sys.modules.keys(), file=sys.stderr)
"""


def test_the_pages_are_current(tmp_path: Path) -> None:
    """If this fails, run ``python docs/help_pages.py``."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("argparse of other versions of Python lays help out differently")
    pins = (REPOSITORY / "constraints.txt").read_text().split()
    for package in ("jsonargparse", "lightning", "torch"):
        if f"{package}=={version(package).partition('+')[0]}" not in pins:
            pytest.skip(f"the pages are those of the pinned {package}")
    program = [sys.executable, str(REPOSITORY / "docs" / "help_pages.py"), str(tmp_path)]
    subprocess.run(program, check=True, timeout=300)
    rendered = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert rendered == {path.name: path.read_text() for path in PAGES.iterdir()}


@pytest.mark.parametrize("command", [*TRAINER, *OWN])
def test_every_command_has_a_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: refusion-lit {command} ")


@pytest.mark.parametrize("command", ["generate", "chat", "trace", "serve", "evaluate"])
@pytest.mark.parametrize("option", ["dtype", "device"])
def test_device_and_type_are_found_where_nobody_names_them(command: str, option: str) -> None:
    page = " ".join((PAGES / f"{command}.txt").read_text(encoding="utf-8").split())
    text = page.rpartition(f" --{option} ")[2].partition(" --")[0]
    assert "default: auto)" in text


@pytest.mark.parametrize("args", [["fit", "--help=all"], ["generate", "-h"], ["trian"]], ids=" ".join)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, which other work on the machine hardly changes: 0.1 s.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert done.stderr.splitlines()[-1] == "set()", done.stderr


def test_commands_without_a_trainer_do_not_import_lightning() -> None:
    modules = {place.partition(".")[0] for place in OWN.values()}
    imports = "; ".join(f"import refusion_lit.cli.{module}" for module in sorted(modules))
    program = f"import sys; {imports}; print({{'lightning'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "set()\n"


def test_the_help_of_a_run_begins_with_a_short_usage_and_names_one_way_to_an_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fit", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: refusion-lit fit --config FILE [--OPTION VALUE ...]\n\n")
    options = {word for line in shown.splitlines() for word in line.split()[:1] if word.startswith("--")}
    assert {"--model.optimizer", "--ckpt_path", "--data.batch_size"} <= options
    assert not {"--optimizer", "--trainer.max_steps"} & options
    assert main(["fit", "--help=all"]) == 0
    assert "--trainer.max_steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args", ["--decoder.help ReFusion", "--decoder.help=ReFusion --prompt x", "--decoder.help ReFusion --prompt=x"]
)
def test_the_options_of_a_class_are_shown(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", *args.split()])
    assert stopped.value.code == 0
    assert "--decoder.slot_size" in capsys.readouterr().out
