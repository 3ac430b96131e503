"""Draft masks in training see and predict what they see and predict in decoding."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import GatedDraft
from refusion_lit.types import ModelTraits
from support.fakes import tiny_backbone

SIZES = [(3, 9), (1, 2), (5, 12)]
TRAITS = ModelTraits(attention="causal", predictions=("next_token",))


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    model = copy.deepcopy(tiny_backbone(TRAITS)).double()
    assert model.drafter is not None
    for weight in model.drafter.up.values():  # zeros at first
        torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(1))
    return model


def corrupt_batch(objective: GatedDraft, backbone: Backbone) -> tuple[ResponseBatch, CorruptedBatch]:
    prompts, responses = torch.tensor(SIZES).unbind(1)
    length = int((prompts + responses).max())
    ids = torch.randint(
        3, backbone.special_tokens.vocab_size, (len(SIZES), length), generator=torch.Generator().manual_seed(0)
    )
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=torch.arange(len(SIZES))
    )
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    return batch, objective.corrupt(batch, noise, backbone.special_tokens)


def logits(backbone: Backbone, corrupted: CorruptedBatch) -> Tensor:
    hidden = backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible, num_drafts=corrupted.num_drafts)
    return backbone.logits(hidden)


def test_masks_after_many_anchors_give_what_a_group_alone_gives_when_it_is_decoded(backbone: Backbone) -> None:
    """Reference: the fused backbone's gate, one group after the text up to its anchor."""
    batch, corrupted = corrupt_batch(GatedDraft(stride=2), backbone)
    with torch.no_grad():
        actual = logits(backbone, corrupted)
    drafts = backbone.special_tokens.draft_token_ids
    num_groups = 0
    for row in range(len(SIZES)):
        for i in (corrupted.input_ids[row] == drafts[0]).nonzero().flatten().tolist():
            length = int((corrupted.labels[row, i : i + len(drafts)] != IGNORE_INDEX).sum())
            anchor = int(corrupted.position_ids[row, i]) - 1
            ids = torch.cat((batch.input_ids[row, : anchor + 1], torch.tensor(drafts[:length])))
            with torch.no_grad():
                hidden = backbone.hidden_states(ids[None], torch.arange(len(ids))[None], None)
            torch.testing.assert_close(actual[row, i : i + length], backbone.logits(hidden)[0, anchor + 1 :])
            num_groups += 1
    assert num_groups > 8


def test_labels_weights_and_loss_by_the_definition(backbone: Backbone) -> None:
    objective = GatedDraft(stride=3, decay=0.5)
    batch, corrupted = corrupt_batch(objective, backbone)
    drafts = backbone.special_tokens.draft_token_ids
    scores = logits(backbone, corrupted).detach()
    total = weight = 0.0
    anchors: dict[int, list[int]] = {row: [] for row in range(len(SIZES))}
    for row, (prompt, response) in enumerate(SIZES):
        for i, token in enumerate(corrupted.input_ids[row].tolist()):
            if token not in drafts:
                continue
            k = drafts.index(token) + 1
            anchor = int(corrupted.position_ids[row, i]) - k
            if k == 1:
                anchors[row].append(anchor)
            assert prompt - 1 <= anchor
            assert anchor + 1 + k < prompt + response
            label = int(batch.input_ids[row, anchor + 1 + k])
            assert int(corrupted.labels[row, i]) == label
            total += 0.5 ** (k - 1) * float(F.cross_entropy(scores[row, i], torch.tensor(label)))
            weight += 0.5 ** (k - 1)
    for row, positions in anchors.items():
        assert all(b - a == 3 for a, b in itertools.pairwise(positions)), row
    loss = objective.loss(backbone_hidden(backbone, corrupted), backbone.head, corrupted)
    torch.testing.assert_close(loss.total.detach().item(), total / weight)


def backbone_hidden(backbone: Backbone, corrupted: CorruptedBatch) -> Tensor:
    return backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible, num_drafts=corrupted.num_drafts)


def test_gradients_reach_the_drafter_alone(backbone: Backbone) -> None:
    model = copy.deepcopy(backbone)
    model.model.requires_grad_(False)
    objective = GatedDraft()
    _, corrupted = corrupt_batch(objective, model)
    objective.loss(backbone_hidden(model, corrupted), model.head, corrupted).total.backward()
    assert model.drafter is not None
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.drafter.up.values())
    assert all(weight.grad is None for weight in model.model.parameters())


def test_a_model_without_drafter_is_refused(backbone: Backbone) -> None:
    batch, _ = corrupt_batch(GatedDraft(), backbone)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    without = tiny_backbone(TRAITS).special_tokens
    with pytest.raises(ValueError, match=r"model\.backbone\.drafter"):
        GatedDraft().corrupt(batch, noise, replace(without, draft_token_ids=()))
