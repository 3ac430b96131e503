from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.modeling.source import ModelSource
from support.tiny import make_base

MODEL = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
NAMES = ("config.json", "tokenizer_config.json")

_opened: Counter[str] | None = None


def _count_open(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and Path(str(args[0])).name in NAMES:
        _opened[Path(str(args[0])).name] += 1


sys.addaudithook(_count_open)  # for good: hooks cannot be removed


@contextmanager
def counted_opens() -> Iterator[Counter[str]]:
    """Count how often this process opens the two files."""
    global _opened
    _opened = Counter()
    try:
        yield _opened
    finally:
        _opened = None


def test_loading_reads_each_file_once() -> None:
    with counted_opens() as opened:
        refusion_lit.load(MODEL)
    assert opened == {"config.json": 1, "tokenizer_config.json": 1}


def test_generating_reads_each_file_once(capsys: pytest.CaptureFixture[str]) -> None:
    with counted_opens() as opened:
        assert main(["generate", f"--ckpt_path={MODEL}", "--prompt=1+2>", "--max_new_tokens=4"]) == 0
    assert opened == {"config.json": 1, "tokenizer_config.json": 1}
    assert "forwards" in capsys.readouterr().err


def test_a_tokenizer_is_the_one_that_transformers_reads(tmp_path: Path) -> None:
    make_base(tmp_path, "abc")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for source in (tmp_path, MODEL):
        ours = PretrainedTokenizer(source=str(source)).build(None)
        theirs = PreTrainedTokenizerFast.from_pretrained(source)
        assert ours.get_vocab().items() >= theirs.get_vocab().items()
        assert ours.special_tokens_map.items() >= theirs.special_tokens_map.items()
        assert ours.chat_template == theirs.chat_template
        assert ours.name_or_path == theirs.name_or_path
        assert ours.model_max_length == theirs.model_max_length


@pytest.mark.parametrize("content", ["{", "[]", "1", "null"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^ckpt_path: .*config\.json"):
        ModelSource.open(str(tmp_path), option="ckpt_path")
