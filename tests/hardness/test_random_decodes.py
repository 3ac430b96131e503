"""A few hundred random decodes; ``nox -s hard`` runs more than ten thousand."""

from __future__ import annotations

import pytest

from hardness.random_decodes import random_decodes
from refusion_lit.decoding import Decoder
from support.decoder_cases import DECODERS
from support.example_counts import examples


@pytest.mark.filterwarnings("ignore:.*ranks masks by confidences after temperature")
@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
def test_random_decodes_fulfil_the_contract(cls: type[Decoder]) -> None:
    counts = random_decodes(cls, num=examples(12), seed=0)
    assert counts.decodes >= examples(12)
    assert "unfinished" not in counts.finish_reasons
