"""The script of ``completion`` is sourced by a real bash, which then completes command lines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_lit.cli import COMMANDS, TRAINER_COMMANDS, lightning, main

REPOSITORY = Path(__file__).parents[2]


# Command lines, and what bash offers for their last word.
LINES = {
    "refusion-lit ge": {"generate"},
    "refusion-lit generate --ck": {"--ckpt_path"},
    "refusion-lit generate --dtype b": {"bfloat16"},
    "refusion-lit generate --decoder WeD": {"WeDLM"},
    "refusion-lit generate --ckpt_path x --decoder ReFusion --decoder.slot_th": {"--decoder.slot_threshold"},
    "refusion-lit fit --model.objective Hy": {"Hybrid"},
    "refusion-lit fit --model.optimizer AdamW": {"AdamW"},
    "refusion-lit fit --data.task.preset mes": {"messages"},
    "refusion-lit fit --config configs/quick": {"configs/quickstart.yaml"},
    "refusion-lit fit --resu": {"--resume"},
    "refusion-lit import-gguf --out": {"--output"},
    "refusion-lit generate --no_such": set(),
}
NO_COMMAND = "refusion-lit "
END = "end of the offers"


@pytest.fixture(scope="module")
def offers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Source the script in one bash, which completes all lines; return the offers by line."""
    pytest.importorskip("shtab")
    parsers = lightning.build_parsers()
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as output:
        patch.setattr(lightning, "build_parsers", lambda: {"fit": parsers["fit"]})  # the others' options take long
        path = tmp_path_factory.mktemp("completion") / "refusion-lit.bash"
        with path.open("w") as file:
            output.setattr("sys.stdout", file)
            assert main(["completion", "bash"]) == 0

    program = f"""
source {shlex.quote(str(path))}
function=$(complete -p refusion-lit | grep -o -- '-F [^ ]*' | cut -c4-)
complete_last_word() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    $function
    printf '%s\\n' "${{COMPREPLY[@]}}" '{END}'
}}
"""
    lines = [*LINES, NO_COMMAND]
    program += "".join(f"complete_last_word {shlex.join(line.split(' '))}\n" for line in lines)
    bash = ["bash", "--norc", "-c", program]
    done = subprocess.run(bash, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=60)
    *parts, rest = done.stdout.split(f"{END}\n")
    assert rest == ""
    return {line: set(part.split()) for line, part in zip(lines, parts, strict=True)}


@pytest.mark.parametrize("line", LINES)
def test_bash_completes_commands_options_and_values(line: str, offers: dict[str, set[str]]) -> None:
    assert offers[line] == LINES[line]


def test_bash_offers_all_commands(offers: dict[str, set[str]]) -> None:
    assert offers[NO_COMMAND] >= {*COMMANDS, "fit"}


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
