"""A block drafter changes no text, whatever it drafts; in training its masks see what they see in decoding."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from refusion_lit.decoding import Autoregressive, SelfSpeculative, decode
from refusion_lit.engine.batch import Batch
from refusion_lit.engine.requests import Branch, Draw, Forward
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.block_drafter import BlockDrafter, BlockDrafterOptions
from refusion_lit.modeling.load import attach
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import BlockDraft, GatedDraft
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.decoder_cases import prompts, temperatures
from support.example_counts import examples
from support.fakes import NUM_EXTRA_ROWS, SPECIAL, VOCAB

NEXT = ModelTraits(predictions=("next_token",))
BLOCK_SIZE = 4
WINDOW = 3
SIZES = [(3, 9), (1, 1), (5, 12)]


@cache
def make_backbone(
    *, fused_body: bool = True, dtype: torch.dtype = torch.float64, window: int = WINDOW, width: int = 16,
    batch_invariant: bool = False, target_window: int | None = None,
) -> Backbone:  # fmt: skip
    """Return a random model with a random block drafter, which has a sliding and a full layer."""
    sliding = {} if target_window is None else {
        "use_sliding_window": True, "sliding_window": target_window, "max_window_layers": 1,
    }  # fmt: skip
    config = Qwen3Config(
        vocab_size=VOCAB + NUM_EXTRA_ROWS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.5,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, **sliding,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config._attn_implementation = "sdpa"
        model: Any = Qwen3ForCausalLM(config)
        model = model.to(dtype).eval()
        special = replace(SPECIAL, draft_token_ids=())
        backbone = Backbone(model, NEXT, special, fused_body=fused_body, batch_invariant=batch_invariant)
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
        options = BlockDrafterOptions(block_size=BLOCK_SIZE, num_layers=2, target_layer_ids=(0, 2), config=layers)
        drafter = BlockDrafter(options.assistant_config(config, mask_token_id=2))
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
    attach(backbone, drafter.to(dtype))
    return backbone


def texts(
    backbone: Backbone, decoder: Any, requests: list[Prompt], sampling: SamplingParams, **options: Any
) -> list[Any]:
    return [row.token_ids for row in decode(backbone, decoder, requests, sampling, **options).rows]


@pytest.mark.parametrize("fused_body", [True, False])
@settings(max_examples=examples(30), deadline=None)
@given(
    requests=prompts(), num_drafts=st.none() | st.integers(0, 9), size=st.integers(1, 4), length=st.integers(1, 17),
    temperature=temperatures(), limit=st.none() | st.integers(1, 40), data=st.data(),
)  # fmt: skip
def test_the_text_is_that_of_autoregressive_decoding(
    fused_body: bool, requests: list[Prompt], num_drafts: int | None, size: int, length: int, temperature: float,
    limit: int | None, data: st.DataObject,
) -> None:  # fmt: skip
    backbone = make_backbone(fused_body=fused_body)
    requests = [replace(prompt, given=(), id=str(i)) for i, prompt in enumerate(requests)]
    sampling = SamplingParams(max_new_tokens=length, temperature=temperature)
    decoder = SelfSpeculative(num_drafts=num_drafts, layout=data.draw(st.sampled_from([None, "two_forwards"])))
    expected = texts(backbone, Autoregressive(), requests, sampling)
    alone = decode(backbone, decoder, requests, sampling, batch_size=1, max_tokens_per_forward=limit)
    batched = decode(backbone, decoder, requests, sampling, batch_size=size, max_tokens_per_forward=limit)
    assert [row.token_ids for row in alone.rows] == expected
    for one, other in zip(alone.rows, batched.rows, strict=True):
        assert one.token_ids == other.token_ids
        assert one.num_forwards == other.num_forwards, "drafts depend on the prompt alone"
        assert one.num_drafter_forwards == other.num_drafter_forwards < one.num_forwards
        assert one.num_forwards <= max(len(one.token_ids), 1)
    assert alone.num_calls == sum(row.num_forwards for row in alone.rows)


def test_shared_prefixes_share_the_drafters_context() -> None:
    backbone = make_backbone()
    start = tuple(range(3, 13)) * 8
    requests = [Prompt(token_ids=(*start, *end), id=str(i)) for i, end in enumerate([(3,), (4, 5), (3, 6, 7)])]
    sampling = SamplingParams(max_new_tokens=12)
    shared = decode(backbone, SelfSpeculative(), requests, sampling, batch_size=2)
    assert shared.num_shared > 0
    alone = [decode(backbone, SelfSpeculative(), [prompt], sampling).rows[0] for prompt in requests]
    assert [(row.token_ids, row.num_forwards) for row in shared.rows] == [(r.token_ids, r.num_forwards) for r in alone]


def test_a_target_beyond_its_sliding_window_keeps_its_text() -> None:
    """Prompts of 2, 12 and more than 80 tokens share batches and prefixes; the window has 8 tokens."""
    backbone = make_backbone(target_window=8)
    assert backbone.window == 8
    start = tuple(range(3, 13)) * 8
    requests = [Prompt(token_ids=(*start, *end), id=str(i)) for i, end in enumerate([(3,), (4, 5), (3, 6, 7)])]
    requests += [Prompt(token_ids=start[:length], id=f"short {length}") for length in (2, 12)]
    sampling = SamplingParams(max_new_tokens=20)
    drafted = decode(backbone, SelfSpeculative(), requests, sampling, batch_size=2)
    assert drafted.num_shared > 0
    for prompt, row in zip(requests, drafted.rows, strict=True):
        text = torch.tensor([[*prompt.token_ids, *row.token_ids]])
        with torch.no_grad():
            logits = backbone.model(input_ids=text).logits[0, len(prompt.token_ids) - 1 : -1]
        special = backbone.special_tokens
        logits[:, [*special.banned_token_ids, *range(special.vocab_size, logits.shape[1])]] = -torch.inf
        assert logits.argmax(-1).tolist() == row.token_ids


def test_log_probabilities_are_the_models() -> None:
    requests = [Prompt(token_ids=(3, 4, 5), id="0"), Prompt(token_ids=(6,), id="1")]
    sampling = SamplingParams(max_new_tokens=12)
    rows = [
        decode(make_backbone(), decoder, requests, sampling, num_top_logprobs=2, batch_size=2).rows
        for decoder in (Autoregressive(), SelfSpeculative())
    ]
    for exact, drafted in zip(*rows, strict=True):
        pairs = zip(exact.logprobs, drafted.logprobs, strict=True)
        assert all(one and other and abs(one.logprob - other.logprob) < 1e-6 for one, other in pairs)
        assert max(entry.forward for entry in drafted.logprobs if entry) == drafted.num_forwards


def test_the_model_as_its_own_drafts_would_be_accepted() -> None:
    """Drafts that equal the text are accepted: a block costs one forward."""
    backbone = make_backbone()
    requests = [Prompt(token_ids=(3, 4, 5), id="0")]
    sampling = SamplingParams(max_new_tokens=13)
    [exact] = texts(backbone, Autoregressive(), requests, sampling)
    oracle: Any = copy.copy(backbone)
    oracle.__class__ = DraftsText
    oracle.text = torch.tensor([*requests[0].token_ids, *exact, *[3] * 99])  # drafts may lie beyond the text
    row = decode(oracle, SelfSpeculative(num_drafts=3), requests, sampling).rows[0]
    assert row.token_ids == exact
    assert row.num_forwards == 1 + ceil((len(exact) - 1) / 4)  # three drafts and one more token


class DraftsText(Backbone):
    """Drafts a given text.

    The draft states are -5, and -6 at the number of the drafted token. The model's own states are not that low, so the
    head can tell them apart and read the token.
    """

    text: Tensor

    def draft_runner(self) -> Any:
        return lambda ids, positions, *_: -5 - F.one_hot(self.text[positions], 16).double()

    def head_runner(self) -> Any:
        return partial(self.read, super().head_runner())

    def read(self, head: Any, hidden: Tensor) -> Tensor:
        is_draft = (hidden <= -5).all(-1, keepdim=True)
        drafted = F.pad(-5 - hidden, (0, self.head.out_features - hidden.shape[-1]))
        return torch.where(is_draft, drafted, head(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_for_which_equal_texts_are_promised(dtype: torch.dtype) -> None:
    """The types are float32, and bfloat16 with ``batch_invariant``."""
    backbone = make_backbone(dtype=dtype, width=32, batch_invariant=dtype == torch.bfloat16)
    requests = [Prompt(token_ids=tuple(3 + (7 * i + j) % 11 for j in range(1 + i % 5)), id=str(i)) for i in range(24)]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=24, temperature=temperature)
        expected = texts(backbone, Autoregressive(), requests, sampling)
        assert texts(backbone, SelfSpeculative(), requests, sampling) == expected
        assert texts(backbone, SelfSpeculative(), requests, sampling, batch_size=7) == expected


def test_rejection_sampling_keeps_the_distribution() -> None:
    backbone = make_backbone()
    requests = [Prompt(token_ids=(3, 4, 5), id=str(i)) for i in range(1500)]
    sampling = SamplingParams(max_new_tokens=3, temperature=0.8)
    decoder = SelfSpeculative(layout="two_forwards", coupling="rejection", num_drafts=2)
    shares = []
    for sequential_or_drafting in (Autoregressive(), decoder):
        last = [tokens[-1] for tokens in texts(backbone, sequential_or_drafting, requests, sampling, batch_size=250)]
        shares.append(torch.bincount(torch.tensor(last), minlength=VOCAB).double() / len(last))
    # Two samples of 1500 from one distribution over 12 tokens have a total variation distance of about 0.05 or less.
    assert (shares[0] - shares[1]).abs().sum() / 2 < 0.08


def corrupt_batch(objective: BlockDraft, backbone: Backbone) -> tuple[ResponseBatch, CorruptedBatch]:
    prompt_lengths, response_lengths = torch.tensor(SIZES).unbind(1)
    shape = (len(SIZES), int((prompt_lengths + response_lengths).max()))
    ids = torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(0))
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=prompt_lengths, response_lengths=response_lengths,
        sample_keys=torch.arange(len(SIZES)),
    )  # fmt: skip
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    return batch, objective.corrupt(batch, noise, backbone.special_tokens)


def train_states(backbone: Backbone, corrupted: CorruptedBatch) -> Tensor:
    return backbone(corrupted.input_ids, corrupted.position_ids, corrupted.visible, num_drafts=corrupted.num_drafts)


@pytest.mark.parametrize("window", [WINDOW, 6, 64])
@torch.no_grad()
def test_masks_in_training_give_what_a_block_gives_when_it_is_decoded(window: int) -> None:
    """Reference: one block over the cache of the text before its anchor."""
    backbone = make_backbone(window=window)
    batch, corrupted = corrupt_batch(BlockDraft(num_anchors=5), backbone)
    logits = backbone.logits(train_states(backbone, corrupted))
    drafts = backbone.special_tokens.draft_token_ids
    draft_states = backbone.draft_runner()
    assert draft_states is not None
    draw = Draw(sampling=SamplingParams())
    num_blocks = 0
    for row in range(len(SIZES)):
        for i in (corrupted.input_ids[row] == drafts[0]).nonzero().flatten().tolist():
            anchor = int(corrupted.position_ids[row, i]) - 1
            ids = batch.input_ids[row].tolist()
            cache = backbone.make_cache(1)
            text = Branch(tokens=ids[:anchor], positions=range(anchor))
            masks = [drafts[0]] * len(drafts)
            block = Branch(
                tokens=[ids[anchor], *masks], positions=range(anchor, anchor + BLOCK_SIZE), order=[0] * BLOCK_SIZE,
                visible=((0, anchor),), write_at=anchor,
            )  # fmt: skip
            hidden = torch.empty(0)
            for branch, run in ((text, backbone.runner()), (block, draft_states)):
                if branch.tokens:
                    fed = Batch([Forward(phase="", branches=(branch,), draw=draw)], [0], backbone.device, cache)
                    hidden = run(fed.ids, fed.positions, fed.visibility, cache)
            torch.testing.assert_close(logits[row, i : i + len(drafts)], backbone.logits(hidden)[0, 1:])
            num_blocks += 1
    assert num_blocks == 5 + 0 + 5  # five anchors, but none in the response of one token, which has no token after it


def test_labels_weights_and_loss_by_the_definition() -> None:
    backbone = make_backbone()
    objective = BlockDraft(num_anchors=4, decay=0.5)
    batch, corrupted = corrupt_batch(objective, backbone)
    drafts = backbone.special_tokens.draft_token_ids
    hidden = train_states(backbone, corrupted)
    scores = backbone.logits(hidden).detach()
    total = weight = 0.0
    for row, (prompt, response) in enumerate(SIZES):
        anchors = []
        for i, token in enumerate(corrupted.input_ids[row].tolist()):
            if token not in drafts:
                continue
            k = drafts.index(token) + 1
            place = int(corrupted.position_ids[row, i])
            anchors += [place - 1] if k == 1 else []
            if place >= prompt + response:
                assert int(corrupted.labels[row, i]) == IGNORE_INDEX
                continue
            label = int(batch.input_ids[row, place])
            assert int(corrupted.labels[row, i]) == label
            total += 0.5 ** (k - 1) * float(F.cross_entropy(scores[row, i], torch.tensor(label)))
            weight += 0.5 ** (k - 1)
        assert len({*anchors}) == len(anchors) == min(4, response - 1)
        assert all(prompt <= anchor < prompt + response - 1 for anchor in anchors)
    loss = objective.loss(hidden, backbone.head, corrupted)
    torch.testing.assert_close(loss.total.detach().item(), total / weight)


def test_gradients_reach_the_drafter_alone() -> None:
    model = copy.deepcopy(make_backbone())
    model.model.requires_grad_(False)
    objective = BlockDraft()
    _, corrupted = corrupt_batch(objective, model)
    objective.loss(train_states(model, corrupted), model.head, corrupted).total.backward()
    assert model.drafter is not None
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.drafter.parameters())
    assert all(weight.grad is None for weight in model.model.parameters())


@pytest.mark.parametrize(("objective", "drafts_block"), [(BlockDraft(), False), (GatedDraft(), True)])
def test_the_other_kind_of_drafter_is_refused(objective: Any, drafts_block: bool) -> None:
    batch, _ = corrupt_batch(BlockDraft(), make_backbone())
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    special = replace(SPECIAL, drafts_block=drafts_block)
    with pytest.raises(ValueError, match=r"^objective: expected a model with a .*drafter"):
        objective.corrupt(batch, noise, special)


def test_a_model_that_cannot_go_beyond_its_context_is_refused() -> None:
    model = copy.deepcopy(make_backbone())
    assert isinstance(model.drafter, BlockDrafter)
    model.learns_positions = True
    with pytest.raises(ValueError, match=r"^drafter: expected a model with rotary positions"):
        attach(model, model.drafter)
