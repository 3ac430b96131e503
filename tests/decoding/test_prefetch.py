from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_cases import DECODERS, decode_with_prefetch, hash_models, prompts, setups, temperatures, traits_for
from fakes import HashModel, OracleModel, oracle_text, tiny_backbone
from refusion_lit.decoding import Decoder, DecodingOutput, RecomputeKV, ReFusion, SelfSpeculative, decode
from refusion_lit.engine.reading import LogitReader
from refusion_lit.modeling import backbone
from refusion_lit.types import Prompt, SamplingParams
from shadow_device import SHADOW, ShadowDevice

PROMPTS = [Prompt(token_ids=tuple(range(3, 3 + length)), id=str(length)) for length in (4, 9, 2)]


def told(output: DecodingOutput) -> list[tuple[list[int], int, str]]:
    return [(row.token_ids, row.num_forwards, row.finish_reason) for row in output.rows]


@pytest.mark.parametrize("cls", [ReFusion, RecomputeKV])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), make=hash_models(), found=prompts(), temperature=temperatures())
def test_prefetching_changes_nothing(
    cls: type[ReFusion],
    data: st.DataObject,
    make: Callable[[Decoder], HashModel],
    found: list[Prompt],
    temperature: float,
) -> None:
    decoder, sampling = data.draw(setups(cls))
    sampling = replace(sampling, temperature=temperature, top_p=0.9)
    size = data.draw(st.integers(1, 4))
    plain = decode(make(decoder), decoder, found, sampling, max_batch_size=size)
    early = decode_with_prefetch(make(decoder), decoder, found, sampling, max_batch_size=size)
    assert told(early) == told(plain)
    assert early.num_calls == plain.num_calls


def test_chosen_slots_are_drafted_in_the_transfer_that_tells_their_certainty(monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads, read = 0, LogitReader.read

    def counting(*args: Any) -> None:
        nonlocal num_reads
        num_reads += 1
        read(*args)

    monkeypatch.setattr(LogitReader, "read", counting)
    model = OracleModel(oracle_text(None))
    decoder = ReFusion(slot_size=4, num_serial_blocks=1, selection="capped", k=2)
    sampling = SamplingParams(max_new_tokens=32)
    output = decode(model, decoder, PROMPTS[:1], sampling)
    assert output.num_calls == 1 + 4  # a plan, and for each two of the eight slots a verification that plans ahead
    assert num_reads == output.num_calls + 4  # the rest of the slots that were chosen
    num_reads = 0
    assert told(decode_with_prefetch(model, decoder, PROMPTS[:1], sampling)) == told(output)
    assert num_reads == output.num_calls


@pytest.mark.parametrize(
    ("temperature", "lean"), [(0.0, False), (1.0, True)], ids=["greedy, library's body", "sampled, lean body"]
)
@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
def test_another_device_gives_the_same_text_and_makes_the_host_wait_at_most_once_a_call(
    cls: type[Decoder], temperature: float, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, sampling = cls(), SamplingParams(max_new_tokens=16, temperature=temperature)
    model = copy.deepcopy(tiny_backbone(traits_for(decoder)))
    if cls is SelfSpeculative and not lean:
        pytest.skip("a drafter needs the lean body")
    model.lean = lean
    here = decode(model, decoder, PROMPTS, sampling, max_batch_size=2)
    monkeypatch.setattr(backbone, "is_known", lambda _body: True)  # it knows plain parameters only
    with ShadowDevice() as device, torch.no_grad():
        model.to(SHADOW)
        device.meetings.clear()
        there = decode(model, decoder, PROMPTS, sampling, max_batch_size=2)
    assert told(there) == told(here)
    assert 0 < device.num_waits == device.meetings["device to host"] <= here.num_calls


def test_the_device_that_does_not_exist_notices_waits_and_mixtures() -> None:
    here = torch.arange(6.0).view(2, 3)
    with ShadowDevice() as device:
        there = here.to(SHADOW, non_blocking=True)
        assert (there.device, device.num_waits) == (SHADOW, 0)
        assert (there @ there.T).cpu().tolist() == (here @ here.T).tolist()
        assert device.num_waits == 1
        here.to(SHADOW)
        assert there.sum().item() == 15
        assert device.num_waits == 3
        for wrong in (lambda: there + here, lambda: there[there > 1], lambda: there[torch.tensor([1])]):
            with pytest.raises(AssertionError):
                wrong()
