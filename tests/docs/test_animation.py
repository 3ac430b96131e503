"""The README's animation shows what the code decodes today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_animation_is_todays_decode() -> None:
    spec = importlib.util.spec_from_file_location("animation", DOCS / "animation.py")
    assert spec is not None
    assert spec.loader is not None
    animation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(animation)
    trace = animation.decode()
    committed = (DOCS / "img" / "decode.svg").read_text(encoding="utf-8")
    assert trace.response == "95+17=112;48+64=112;33+29=62;70+55=125;"
    label = re.search(r'aria-label="ReFusion decodes (\d+) tokens in (\d+) forwards"', committed)
    assert label is not None
    assert [int(number) for number in label.groups()] == [len(trace.token_ids), trace.num_forwards]
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"![{label[0].removeprefix('aria-label=').strip(chr(34))}](docs/img/decode.svg)" in readme
