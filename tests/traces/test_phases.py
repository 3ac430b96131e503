"""Every phase that a decoder gives its forwards is explained."""

from __future__ import annotations

import pytest

from refusion_lit.decoding import BlockDiffusion, Decoder, FastDLLM, ReFusion, decode
from refusion_lit.traces.document import explain_phase
from refusion_lit.types import Prompt, SamplingParams
from support.decoder_cases import DECODERS, traits_for
from support.fakes import HashModel

OPTIONS = {
    FastDLLM: [{"cache": cache} for cache in ("none", "prefix", "dual")],
    BlockDiffusion: [{"shifted": True}],
    ReFusion: [{"infill": infill, "fused": fused} for infill in ("mask", "autoregressive") for fused in (False, True)],
}


@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
def test_phases_of_every_decoder(cls: type[Decoder]) -> None:
    for options in [{}, *OPTIONS.get(cls, [])]:
        sampling = SamplingParams(max_new_tokens=16, seed=1)
        decoder, prompt = cls(**options), Prompt(id="a", token_ids=(5, 6, 7))
        [row] = decode(HashModel(3, traits=traits_for(decoder)), decoder, [prompt], sampling, trace=True).rows
        assert {entry.phase for entry in row.trace if not explain_phase(entry.phase)} == set()


def test_unknown_phases_have_no_explanation() -> None:
    assert explain_phase("guess") == explain_phase("plan+guess") == ""
    assert explain_phase("verify+plan") == f"{explain_phase('verify')}; it also {explain_phase('plan')}"
