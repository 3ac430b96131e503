"""``MaskWindows``: each mask sees and predicts what it does when a decoder plans after a complete prefix."""

from __future__ import annotations

import pytest
import torch

from refusion_lit.learning.batch import CorruptedBatch, ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import MaskWindows
from support.attention_masks import attention_mask
from support.fakes import tiny_backbone

SIZES = [(3, 9), (1, 2), (5, 12), (0, 4)]
"""Number of tokens of each row's prompt and response."""
Group = list[int]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return tiny_backbone().double()


def corrupt_batch(objective: MaskWindows, backbone: Backbone) -> tuple[ResponseBatch, CorruptedBatch]:
    prompts, responses = torch.tensor(SIZES).unbind(1)
    shape = len(SIZES), int((prompts + responses).max())
    ids = torch.randint(3, backbone.special_tokens.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=prompts, response_lengths=responses, sample_keys=torch.arange(len(SIZES))
    )
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    return batch, objective.corrupt(batch, noise, backbone.special_tokens)


def windows(corrupted: CorruptedBatch, row: int) -> list[Group]:
    """Return the indices of each window's masks: a mask that sees no mask before it begins a window."""
    visible, masked = attention_mask(corrupted), corrupted.is_masked
    assert visible is not None
    assert masked is not None
    groups: list[Group] = []
    for i in masked[row].nonzero().flatten().tolist():
        before = (visible[row, i] & masked[row])[:i].nonzero().flatten().tolist()
        assert before == (groups[-1] if before else [])
        if not before:
            groups.append([])
        groups[-1].append(i)
    return groups


def hidden_states(backbone: Backbone, corrupted: CorruptedBatch) -> torch.Tensor:
    return backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible)


def test_windows_give_what_a_plan_after_the_prefix_gives(backbone: Backbone) -> None:
    """Reference: the fused backbone on the text before a window and its masks alone."""
    objective = MaskWindows(window=4, num_tilings=3)
    batch, corrupted = corrupt_batch(objective, backbone)
    mask = backbone.special_tokens.mask_token_id
    assert mask is not None
    with torch.no_grad():
        logits = backbone.logits(hidden_states(backbone, corrupted))
    sizes = []
    for row, (prompt, response) in enumerate(SIZES):
        groups = windows(corrupted, row)
        starts = [int(corrupted.position_ids[row, group[0]]) for group in groups]
        places = [
            place for start, group in zip(starts, groups, strict=True) for place in range(start, start + len(group))
        ]
        assert places == 3 * list(range(prompt, prompt + response)), "each tiling covers the response"
        for start, group in zip(starts, groups, strict=True):
            ids = torch.cat((batch.input_ids[row, :start], torch.full((len(group),), mask)))
            with torch.no_grad():
                alone = backbone.logits(backbone.hidden_states(ids[None], torch.arange(len(ids))[None], None))
            torch.testing.assert_close(logits[row, group], alone[0, start:])
            assert torch.equal(corrupted.labels[row, group], batch.input_ids[row, start : start + len(group)])
        sizes += [len(group) for group in groups]
    assert max(sizes) == 4
    assert set(sizes) == {1, 2, 3, 4}, "first windows begin at random offsets"


def test_loss_by_the_definition(backbone: Backbone) -> None:
    objective = MaskWindows(window=4, num_tilings=2, decay=0.5, mdm_weight=0.7)
    batch, corrupted = corrupt_batch(objective, backbone)
    with torch.no_grad():
        hidden = hidden_states(backbone, corrupted)
    scores = backbone.logits(hidden).log_softmax(-1).detach()
    with torch.no_grad():
        positions = torch.arange(batch.input_ids.shape[1])[None].expand_as(batch.input_ids)
        text_scores = backbone.logits(backbone.hidden_states(batch.input_ids, positions, None)).log_softmax(-1)
    total = weight = 0.0
    text: list[float] = []
    for row, (prompt, response) in enumerate(SIZES):
        before_response_tokens = range(prompt, prompt + response - 1)
        text += [-float(text_scores[row, place, batch.input_ids[row, place + 1]]) for place in before_response_tokens]
        for group in windows(corrupted, row):
            for offset, i in enumerate(group):
                place = int(corrupted.position_ids[row, i])
                loss = -scores[row, i, batch.input_ids[row, place]]
                total += 0.5**offset * float(loss)
                weight += 0.5**offset
    loss = objective.loss(hidden, backbone.head, corrupted)
    torch.testing.assert_close(float(loss.total.detach()), sum(text) / len(text) + 0.7 * total / weight)


@pytest.mark.parametrize("options", [{"window": 0}, {"num_tilings": 0}, {"decay": 0.0}, {"mdm_weight": -1.0}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"^objective\.{next(iter(options))}"):
        MaskWindows(**options)  # type: ignore[arg-type]


def test_counts_of_single_samples_add_up_to_those_of_the_batch(backbone: Backbone) -> None:
    objective = MaskWindows(window=4, num_tilings=3, decay=0.7)
    batch, together = corrupt_batch(objective, backbone)
    counts = torch.zeros_like(together.counts)
    for row, (prompt, response) in enumerate(SIZES):
        alone = ResponseBatch(
            input_ids=batch.input_ids[row : row + 1, : prompt + response],
            prompt_lengths=batch.prompt_lengths[row : row + 1],
            response_lengths=batch.response_lengths[row : row + 1],
            sample_keys=batch.sample_keys[row : row + 1],
        )
        noise = KeyedNoise.for_samples(alone.sample_keys, seed=0, epoch=0)
        counts += objective.corrupt(alone, noise, backbone.special_tokens).counts
    torch.testing.assert_close(counts, together.counts, rtol=1e-12, atol=0)
