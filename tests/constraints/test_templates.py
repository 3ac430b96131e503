"""Templates of responses: texts with gaps such as ``{{3}}``, and holes of examples for infilling."""

from __future__ import annotations

from pathlib import Path

import pytest

from refusion_lit.cli.generate import read_template
from refusion_lit.constraints.templates import Template
from refusion_lit.data.evaluation import encode_given
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.tasks import Example

TOKENIZER = CharacterTokenizer(characters="abcdefgh{}.-0123456789 ").build(None)


def render(tokens: tuple[int | None, ...]) -> str:
    """Return tokens as text, gaps as underscores and the end as a bar."""
    names = {None: "_", TOKENIZER.eos_token_id: "|"}
    return "".join(names[t] if t in names else TOKENIZER.decode([t]) for t in tokens)


@pytest.mark.parametrize(
    ("text", "parts", "is_open"),
    [
        ("ab{{3}}c", ("ab", (3, 3), "c"), False),
        ("{{ 1 - 6 }}", ((1, 6),), False),
        ("{a:{{2}}}", ("{a:", (2, 2), "}"), False),
        ("ab{{...}}", ("ab",), True),
        ("{{2}}{{3}}a", ((2, 2), (3, 3), "a"), False),
        ("{{a}} {{}} {{1-}}", ("{{a}} {{}} {{1-}}",), False),
    ],
)
def test_gaps_are_numbers_in_double_braces(text: str, parts: tuple[object, ...], is_open: bool) -> None:
    assert Template.parse(text) == Template(parts=parts, is_open=is_open)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "template: .*span"),
        ("{{...}}", "template: .*span"),
        ("a{{0}}", "template: .*1000000 tokens.* got '{{0}}'"),
        ("a{{5-2}}", "template: .*1000000 tokens.* got '{{5-2}}'"),
        ("a{{99999999999}}", "template: .*1000000 tokens.* got '{{99999999999}}'"),
        ("a{{...}}b", r"template: .*\.\.\.}} at its end"),
        ("{{1-9}}a{{1-9}}", "template: .*at most 64 .*got 81"),
    ],
)
def test_impossible_templates_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{{", r"\{\{")):
        Template.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab{{2}}c", ["ab__c|"]),
        ("{{1-3}}a", ["_a|", "__a|", "___a|"]),
        ("a{{1-2}}b{{1-2}}", ["a_b_|", "a_b__|", "a__b_|", "a__b__|"]),
        ("a{{2}}{{...}}", ["a__"]),
    ],
)
def test_encodes_each_combination_of_lengths(text: str, expected: list[str]) -> None:
    assert [render(tokens) for tokens in Template.parse(text).encode(TOKENIZER)] == expected


def test_holes_of_an_example_are_as_long_as_its_text() -> None:
    example = Example(id="x", query="a", response="ab12cd", spans=((0, 1), (2, 4)))
    assert render(encode_given(TOKENIZER, example)) == "_b__cd|"
    assert encode_given(TOKENIZER, Example(id="x", query="a", response="ab")) == ()


@pytest.mark.parametrize("spans", [((2, 4), (0, 1)), ((0, 3), (2, 4)), ((4, 7),), ((-1, 2),), ((3, 2),)])
def test_holes_out_of_order_or_outside_the_text_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    """Such spans would give or leave out text twice."""
    with pytest.raises(ValueError, match=r"example x: spans: .*text order"):
        encode_given(TOKENIZER, Example(id="x", query="a", response="ab12cd", spans=spans))


def test_a_file_loses_one_line_break_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a{{2}}\n\n")
    assert read_template(str(path)) == "a{{2}}\n"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_template(str(path))
    with pytest.raises(ValueError, match=r"template: .*file"):
        read_template(str(tmp_path / "none"))
