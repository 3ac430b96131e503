"""The script of ``completion`` is sourced by a real bash, which then completes command lines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refusion_lit.cli import COMMANDS, TRAINER_COMMANDS, lightning, main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], set[str]]:
    """Return a function that lists what bash offers at the end of a command line."""
    pytest.importorskip("shtab")
    parsers = lightning.build_parsers()
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as output:
        patch.setattr(lightning, "build_parsers", lambda: {"fit": parsers["fit"]})  # the others' options take long
        path = tmp_path_factory.mktemp("completion") / "refusion-lit.bash"
        with path.open("w") as file:
            output.setattr("sys.stdout", file)
            assert main(["completion", "bash"]) == 0

    def list_completions(line: str) -> set[str]:
        words = line.split(" ")
        program = f"""
source {shlex.quote(str(path))}
COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}
function=$(complete -p refusion-lit | grep -o -- '-F [^ ]*' | cut -c4-); $function
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        bash = ["bash", "--norc", "-c", program]
        done = subprocess.run(bash, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=60)
        return set(done.stdout.split())

    return list_completions


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("refusion-lit ge", {"generate"}),
        ("refusion-lit generate --ck", {"--ckpt_path"}),
        ("refusion-lit generate --dtype b", {"bfloat16"}),
        ("refusion-lit generate --decoder WeD", {"WeDLM"}),
        ("refusion-lit generate --ckpt_path x --decoder ReFusion --decoder.slot_th", {"--decoder.slot_threshold"}),
        ("refusion-lit fit --model.objective Hy", {"Hybrid"}),
        ("refusion-lit fit --model.optimizer AdamW", {"AdamW"}),
        ("refusion-lit fit --data.task.preset mes", {"messages"}),
        ("refusion-lit fit --config configs/quick", {"configs/quickstart.yaml"}),
        ("refusion-lit fit --resu", {"--resume"}),
        ("refusion-lit import-gguf --out", {"--output"}),
        ("refusion-lit generate --no_such", set()),
    ],
)
def test_bash_completes_commands_options_and_values(
    line: str, expected: set[str], complete: Callable[[str], set[str]]
) -> None:
    assert complete(line) == expected


def test_bash_offers_all_commands(complete: Callable[[str], set[str]]) -> None:
    assert complete("refusion-lit ") >= {*COMMANDS, "fit"}


def test_the_script_of_zsh_has_the_same_options_and_completes_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    monkeypatch.setattr(lightning, "build_parsers", dict)
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef refusion-lit")
    ckpt_path = re.findall(r'"--ckpt_path\[.*', script)
    assert ckpt_path
    assert all(line.endswith(':_files"') for line in ckpt_path)
    decoders = re.findall(r'"--decoder\[.*\((.*)\)"$', script, flags=re.MULTILINE)
    assert {"ReFusion", "WeDLM"} <= set(decoders[0].split())


def test_all_commands_of_the_trainer_have_parsers() -> None:
    parsers = lightning.build_parsers()
    assert {*parsers} == {*TRAINER_COMMANDS}
    assert all("--data.batch_size" in parser._option_string_actions for parser in parsers.values())


def test_without_shtab_the_error_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_an_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    error = capsys.readouterr().err
    assert "bash" in error
    assert "zsh" in error
