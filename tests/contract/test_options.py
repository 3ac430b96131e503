"""All decoders and objectives take options by name only, and numbers have the smallest sensible minimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest

from refusion_lit.decoding import Decoder, RowState
from refusion_lit.objectives import Objective

MINIMA = {
    ("IntrospectiveStrided", "num_verified"): 0,
    ("_BlockOfMasks", "max_thinking_tokens"): 0,
    ("_BlockOfMasks", "end_think_token_id"): 0,
    ("SelfSpeculative", "num_drafts"): 0,
    ("TokenEditing", "max_post_steps"): 0,
    ("UniformDiffusion", "stability_threshold"): 0,
    ("GroupPolicy", "group_size"): 2,
    ("SoftTail", "tail"): 1.0,
}
"""Minima that differ from the default: 1 for integers, 0 for other numbers."""


def find_subclasses(base: type) -> Iterator[type]:
    """Yield the package's direct and indirect subclasses of a class."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("refusion_lit."):
            yield cls
        yield from find_subclasses(cls)


COMPONENTS = sorted({*find_subclasses(Decoder), *find_subclasses(Objective)}, key=str)


@pytest.mark.parametrize(
    "cls", [*COMPONENTS, *sorted(find_subclasses(RowState), key=str)], ids=lambda cls: cls.__name__
)
def test_every_option_is_given_by_name(cls: type) -> None:
    positional = ["prompt", "sampling", "special_tokens"] if issubclass(cls, RowState) else []  # Decoder.begin's
    assert [field.name for field in fields(cls) if not field.kw_only] == positional


@pytest.mark.parametrize("cls", COMPONENTS, ids=lambda cls: cls.__name__)
def test_options_have_the_smallest_minimum_that_makes_sense(cls: type) -> None:
    for name, limit in vars(cls).get("ranges", {}).items():
        if not isinstance(limit, str):
            assert limit == MINIMA.get((cls.__name__, name), 1 if type(limit) is int else 0.0), name
