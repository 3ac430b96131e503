"""``chat``: history, order of decoding, commands."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refusion_lit import load
from refusion_lit.cli import main
from refusion_lit.cli.chat import Chat, build_parser, order_line
from refusion_lit.cli.model_options import Setup, build_sampling
from refusion_lit.types import DecodingOptions
from traces.samples import plan_and_verify

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-mid"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ ';' if m['role'] != 'user' else '>' }}{% endfor %}"


def talk(text: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", "--max_new_tokens=32", *args])


def make_chat(template: str | None, *args: str) -> Chat:
    model = load(MODEL)
    model.tokenizer.chat_template = template
    parser = build_parser()
    options: Any = parser.instantiate_classes(
        parser.parse_args([f"--ckpt_path={MODEL}", "--max_new_tokens=16", "--decoder=ReFusion", *args])
    )
    return Chat(
        Setup(model, options.decoder, build_sampling(options), DecodingOptions()),
        options.system,
        Console(file=io.StringIO(), width=200),
    )


def record_prompts(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the chat adds every prompt that it encodes, as text without spaces."""
    prompts: list[str] = []
    encode = chat.model.encode

    def record(*args: Any) -> list[int]:
        ids = encode(*args)
        prompts.append(chat.model.tokenizer.decode(ids).replace(" ", ""))
        return ids

    monkeypatch.setattr(chat.model, "encode", record)
    return prompts


def test_an_interrupt_at_the_prompt_leaves_and_help_explains_the_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["/help"])

    def type_line(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", type_line)
    assert main(["chat", f"--ckpt_path={MODEL}"]) == 0
    shown = capsys.readouterr()
    assert 'order: [2]12[1]+34 below an answer says that forward 2 decoded "12"' in shown.out
    assert "error" not in shown.err


def test_questions_are_answered_in_turn_with_their_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "12+34,56+78>\n\n/nonsense\nzz\n34+12>\n/quit\n9"
    assert talk(lines, [f"--ckpt_path={MODEL}"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("12+34=46;56+78=134;\norder: [")
    assert shown.out.count("forwards") == 2
    for message in ("no chat template", "expected one of its commands, got '/nonsense'", "no token for 'z'"):
        assert message in shown.err


def test_a_response_as_long_as_the_context_is_refused_before_the_first_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("12+34>\n", [f"--ckpt_path={MODEL}", "--max_new_tokens=512"], monkeypatch) == 2
    shown = capsys.readouterr()
    assert "max_new_tokens: expected less than the model's context of 512 tokens, got 512" in shown.err
    assert not shown.out


def test_a_system_message_needs_a_chat_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("12+34>\n", [f"--ckpt_path={MODEL}", "--system=be nice"], monkeypatch) == 2
    assert "system: expected a tokenizer with a chat template, got 'be nice'" in capsys.readouterr().err


def test_the_model_sees_what_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = make_chat(TEMPLATE, "--system=1")
    prompts = record_prompts(chat, monkeypatch)
    first = chat.ask("12+34")
    second = chat.ask("5+6")
    assert prompts == ["1;12+34>", f"1;12+34>{first};5+6>".replace(" ", "")]
    assert chat.turns == [("12+34", first), ("5+6", second)]
    chat.take("/reset")
    chat.ask("7")
    assert prompts[-1] == "1;7>"


def test_the_oldest_turns_are_left_out_with_a_note_when_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = make_chat(TEMPLATE, "--system=1")
    file = io.StringIO()
    chat.console = Console(file=file, width=200)
    # A character is a token. With the question, three turns have 594 tokens, and the last two turns have 392. The
    # context has 512, of which the answer may take 16.
    chat.turns = [("2" * 100, "3" * 100), ("4" * 100, "5" * 100), ("6" * 90, "7" * 90)]
    prompts = record_prompts(chat, monkeypatch)
    chat.ask("12+34")
    assert "1 earlier turns are left out: the context is full" in file.getvalue()
    assert prompts[-1] == f"1;{'4' * 100}>{'5' * 100};{'6' * 90}>{'7' * 90};12+34>"
    assert len(chat.turns) == 4
    chat.take("/reset")
    chat.ask("1+2")
    assert file.getvalue().count("left out") == 1


def test_a_refused_question_leaves_the_conversation_as_it_was() -> None:
    chat = make_chat(TEMPLATE)
    chat.ask("1+2")
    before = list(chat.turns)
    with pytest.raises(ValueError, match="no token for"):
        chat.take("zz")
    assert chat.turns == before


def test_a_question_beyond_the_context_is_refused_and_the_conversation_continues(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert talk(f"{'12+34,' * 100}\n12+34,56+78>\n", [f"--ckpt_path={MODEL}"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert "prompt 0: expected at most 480 tokens (a context of 512 less max_new_tokens 32), got 600" in shown.err
    assert shown.out.startswith("12+34=46;56+78=134;\norder: [")


def test_the_canvas_is_shown_while_it_fills() -> None:
    chat = make_chat(None)
    file = io.StringIO()
    chat.console = Console(file=file, force_terminal=True, width=100, color_system="truecolor")
    chat.ask("12+34,56+78>")
    assert "\x1b[30;48;2;" in file.getvalue()  # black on a round's colour


def test_the_order_groups_what_one_forward_decoded() -> None:
    assert order_line(plan_and_verify()).plain == "order: [4]eb[2]cd"


@pytest.mark.parametrize("name", ["max_new_tokens", "decoder.slot_size"])
def test_wrong_options_are_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert talk("1", [f"--ckpt_path={MODEL}", f"--{name}=0"], monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"refusion-lit: error: {name}: expected an integer of at least ")
    assert error.endswith(" or more.\n"), "nothing of the parser's own"


def test_a_model_that_does_not_fit_is_refused_before_the_first_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    options = [f"--ckpt_path={tmp_path / 'model'}", "--attention=bidirectional", "--decoder=ReFusion"]
    assert talk("", options, monkeypatch) == 2
    assert "ReFusion does not fit this model" in capsys.readouterr().err
