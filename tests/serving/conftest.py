"""A server on a tiny model for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from refusion_lit import load
from refusion_lit.text_model import TextModel


@pytest.fixture(scope="session")
def model() -> TextModel:
    from support.servers import MODEL

    return load(MODEL, device="cpu")


@pytest.fixture(scope="module")
def server(model: TextModel) -> Iterator[Any]:
    """One server for all tests that leave it as it was."""
    from support.servers import serving

    with serving(model) as running:
        yield running
