"""Digests of weights, by which a run notices other weights."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from refusion_lit.modeling.backbone import get_body
from refusion_lit.modeling.drafter import load_drafter
from refusion_lit.modeling.saving import save_drafter
from refusion_lit.modeling.weights import weights_digest
from support.fakes import tiny_backbone


def test_other_weights_and_other_shapes_have_other_digests() -> None:
    model = tiny_backbone()
    digests = {weights_digest(model)}
    for number, parameter in enumerate(model.parameters()):
        other = copy.deepcopy(model)
        changed = list(other.parameters())[number]
        with torch.no_grad():
            changed.view(-1)[0 if number % 2 else -1] += 1.0
        assert parameter.shape == changed.shape
        digests.add(weights_digest(other))
    assert len(digests) == 1 + len(list(model.parameters()))
    assert None not in digests
    narrow, wide = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
    with torch.no_grad():
        wide.weight.copy_(narrow.weight.view(2, 3))
        wide.bias.zero_()
        narrow.bias.zero_()
    assert weights_digest(narrow) != weights_digest(wide)


def test_the_type_that_weights_are_loaded_in_changes_no_digest() -> None:
    model = torch.nn.Linear(40, 30)
    assert weights_digest(copy.deepcopy(model).bfloat16()) == weights_digest(model) == weights_digest(model.double())


def test_a_large_embedding_has_a_digest() -> None:
    """Indices above 2^24 are not exact in float32."""
    model = torch.nn.Embedding(28_312_128, 1, _weight=torch.zeros(28_312_128, 1))
    before = weights_digest(model)
    model.weight.data[-1] = 1
    assert weights_digest(model) != before


def test_a_models_own_drafter_goes_with_it_in_float16(tmp_path: Path) -> None:
    model = tiny_backbone()
    assert model.drafter is not None
    torch.nn.init.constant_(model.head.weight, 1.003907)  # float16 rounds it to a tie of bfloat16, which goes to 1
    save_drafter(model.drafter, get_body(model.model.float()), tmp_path, vocab_size=8)
    half = copy.deepcopy(model.model).half()
    assert weights_digest(half) != weights_digest(model.model)
    load_drafter(get_body(half), tmp_path)
