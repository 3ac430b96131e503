"""The README's animation shows what the code decodes today."""

from __future__ import annotations

import re
from pathlib import Path

from support.modules import load_module

DOCS = Path(__file__).parents[2] / "docs"


def test_the_animation_is_todays_decode() -> None:
    animation = load_module(DOCS / "animation.py")
    trace = animation.decode()
    committed = (DOCS / "img" / "decode.svg").read_text(encoding="utf-8")
    assert trace.response == "95+17=112;48+64=112;33+29=62;70+55=125;"
    label = re.search(r'aria-label="ReFusion decodes (\d+) tokens in (\d+) forwards"', committed)
    assert label is not None
    assert [int(number) for number in label.groups()] == [len(trace.token_ids), trace.num_forwards]
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"![{label[0].removeprefix('aria-label=').strip(chr(34))}](docs/img/decode.svg)" in readme
