"""Random decoders with options, models and prompts, and checks that hold for every output.

Decoders are found as subclasses, and their options are drawn from their dataclass fields. A new decoder is tested
without a change here.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

import refusion_lit.families
import refusion_lit.refusion
from refusion_lit.contrib import APD, CARD, D2F, Convolutional, SetDiffusion
from refusion_lit.decoding import (
    BlockDiffusion,
    CausalBlockDiffusion,
    Decoder,
    DecodingOutput,
    FastDLLM,
    GenerationCallback,
    LinearSpeculation,
    LLaDA,
    ReFusion,
    RowState,
    SelfSpeculative,
    TokenEditing,
    UniformDiffusion,
    WeDLM,
)
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.fakes import DRAFTS, EOS, MASK, SPECIAL, VOCAB, FakeModel, HashModel
from support.subclasses import concrete_subclasses

# A class is a subclass only once its module is imported.
for package in (refusion_lit.refusion, refusion_lit.families):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".custom_generate"):  # programs for transformers alone
            importlib.import_module(module.name)

DECODERS = concrete_subclasses(Decoder)

# Options.

STARTS: dict[type[Decoder], list[dict[str, Any]]] = {
    ReFusion: [
        {"selection": "top_k", "k": 2, "slot_size": 3},
        {"slot_size": 4, "num_serial_blocks": 1, "slot_threshold": 0.3},
        {"slot_size": 4, "num_serial_blocks": 1, "slot_threshold": 0.1, "token_threshold": 0.5},
    ],
    BlockDiffusion: [
        {"sampling_rule": "first_hitting"},
        {"sampling_rule": "sequential", "block_size": 4, "num_steps": 2},
        {"sampling_rule": "entropy_bounded", "block_size": 4, "entropy_bound": 1.0, "confidence": "tempered"},
        {"block_size": 4, "num_steps": 2, "threshold": 0.85, "confidence": "tempered", "fused": False},
        {"shifted": True, "sub_block_size": 4},
        {"shifted": True, "sub_block_size": 4, "sub_block_cache": True},
    ],
    Convolutional: [{"steps": 4, "kernel_size": 3}],
    LLaDA: [{"order": "entropy"}, {"order": "origin", "steps": 4}],
    FastDLLM: [
        {"threshold": None, "factor": 1.0, "cache": "prefix", "block_length": 5},
        {"threshold": 0.5, "cache": "dual", "block_length": 6, "shifted": True},
        {"threshold": None, "order": "entropy", "cache": "prefix", "block_length": 8, "steps": 8, "shifted": True},
        {"threshold": 0.5, "order": "maskgit_plus", "block_length": None, "steps": 4, "shifted": True},
    ],
    CARD: [
        {"block_size": 4, "threshold": 0.5, "max_rounds": 2},
        {"block_size": 5, "max_rounds": None},
        {"block_size": 6, "threshold": 1.0, "max_rounds": None, "num_steps": 2},
    ],
    APD: [
        {"mixture_weight": 0.5, "max_lookahead": 6},
        {"mixture_weight": 0.95, "max_lookahead": None, "shifted": True},
    ],
    CausalBlockDiffusion: [
        {"block_size": 4, "threshold": 0.5},
        {"block_size": 3, "threshold": None, "causal_context": False},
        {"block_size": 5, "max_thinking_tokens": 7, "end_think_token_id": 4},
    ],
    LinearSpeculation: [
        {"block_size": 4},
        {"block_size": 5, "threshold": 0.5},
        {"block_size": 4, "max_thinking_tokens": 6, "end_think_token_id": 4},
    ],
    D2F: [
        {"block_size": 4, "threshold": 0.5},
        {"block_size": 3, "threshold": 0.5, "num_open_blocks": 2, "activate_threshold": 0.5},
        {"block_size": 4, "add_threshold": 0.5},
    ],
    SetDiffusion: [{"window_size": 4, "threshold": 0.5}, {"window_size": 6, "threshold": None, "quota": 2}],
    TokenEditing: [
        {"block_size": 4, "mask_threshold": 0.5, "edit_threshold": 0.5},
        {"block_size": 5, "mask_threshold": 0.25, "edit_threshold": 0.1, "confidence": "tempered"},
    ],
    UniformDiffusion: [
        {"canvas_length": 5, "num_steps": 3, "entropy_bound": 0.5},
        {"canvas_length": 8, "num_steps": 4, "confidence_threshold": 0.0},
    ],
    WeDLM: [
        {"window_size": 3, "entropy_threshold": 0.8},
        {"window_size": 6},
        {"selection": "confidence", "window_size": 4, "confidence_threshold": 0.5},
    ],
}
"""Combinations of options that random drawing finds too seldom; drawing starts from them. A decoder may have none."""


IDS = {"end_think_token_id": st.sampled_from([None, 3, 4])}
"""Options that are ids of tokens; not every id may be written."""


def option_values(hint: Any, default: Any) -> st.SearchStrategy[Any]:
    """Return values for an option, by its type; numbers are kept small, so that much happens in a short text."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*(option_values(kind, default) for kind in get_args(hint)))
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(1, 8)
    if hint is float:
        return st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 0.95, 1.0])
    return st.none() if hint is NoneType else st.just(default)


def is_accepted(make: Callable[..., Any], **options: Any) -> bool:
    try:
        make(**options)
    except ValueError:
        return False
    return True


def add_accepted(cls: type[Decoder], options: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """Return options with the drawn options that a decoder accepts beside them.

    Drawn options are tried one by one, then by pairs, because some options are only allowed together.
    """
    singles, pairs = [(name,) for name in drawn], product(drawn, drawn)
    for names in [*singles, *pairs]:
        trial = options | {name: drawn[name] for name in names}
        if is_accepted(cls, **trial):
            options = trial
    return options


def make_with_length(
    cls: type[Decoder], options: dict[str, Any], lengths: Sequence[int]
) -> tuple[Decoder, SamplingParams]:
    """Return a decoder, and sampling options with the first length that the decoder accepts.

    If the decoder accepts no length, options are dropped from the end until it does.
    """
    for num_options in range(len(options), -1, -1):
        first_options = dict(list(options.items())[:num_options])
        if not is_accepted(cls, **first_options):
            continue
        decoder = cls(**first_options)
        for length in lengths:
            sampling = SamplingParams(max_new_tokens=length)
            if is_accepted(decoder.check, sampling=sampling):
                return decoder, sampling
    raise AssertionError(f"{cls.__name__} accepts no length of {lengths}, even without options")


def fill_until_accepted(decoder: Decoder, prompt: Prompt) -> Prompt:
    """Fill in holes of a template from the left until the decoder sees all given text."""
    while decoder.refusal(prompt) is not None:
        first = prompt.given.index(None)
        prompt = replace(prompt, given=(*prompt.given[:first], 3, *prompt.given[first + 1 :]))
    return prompt


@st.composite
def setups(draw: st.DrawFn, cls: type[Decoder]) -> tuple[Decoder, SamplingParams]:
    """Draw a decoder and its sampling options.

    Drawn options are added to a combination of ``STARTS``, or to none. An option that the other options forbid keeps
    its default.
    """
    hints = get_type_hints(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    # An integer stands for a set of options: bit i says whether option i is drawn. Hypothesis shrinks it to no option.
    bits = draw(st.integers(0, 2 ** len(defaults) - 1))
    names = [name for i, name in enumerate(defaults) if bits >> i & 1]
    drawn = {name: draw(IDS[name] if name in IDS else option_values(hints[name], defaults[name])) for name in names}
    starts = next((STARTS[base] for base in cls.__mro__ if base in STARTS), [])
    options = add_accepted(cls, draw(st.sampled_from([{}, *starts])), drawn)
    # Many decoders need a multiple of their block size, which the drawn length seldom is: fixed lengths follow it.
    lengths = [draw(st.integers(1, 28)), 8, 12, 16, 24, 32, 64]
    return make_with_length(cls, options, lengths)


# Models and prompts.

# The usual special tokens, and unusual ones: the last id is the mask, two ids end a text, and padding is one of them.
SPECIALS = [
    SPECIAL,
    SpecialTokens(
        mask_token_id=VOCAB - 1, eos_token_ids=(EOS, 5), pad_token_id=EOS, vocab_size=VOCAB, draft_token_ids=DRAFTS[:2]
    ),
]


def traits_for(decoder: Decoder) -> ModelTraits:
    """Return the traits of a model that was trained for a decoder."""
    needs = decoder.requirements()
    # A block-causal model has some block size, even where the decoder requires none.
    size = needs.block_size or (4 if needs.attention == "block_causal" else None)
    return ModelTraits(attention=needs.attention, block_size=size, predictions=needs.predictions,
                       prompt_is_block=needs.prompt_is_block)  # fmt: skip


@st.composite
def hash_models(
    draw: st.DrawFn, flavours: Sequence[str] = ("plain", "plain", "ties", "extreme", "banned")
) -> Callable[[Decoder], HashModel]:
    """Draw a function that makes a hash model for a decoder; the same call gives the same model again."""
    options = {
        "seed": draw(st.integers(0, 9999)),
        "flavour": draw(st.sampled_from(flavours)),
        "ends": draw(st.frozensets(st.integers(0, 40), max_size=3)),
        "end_bias": draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0, 60.0])),
        "special": draw(st.sampled_from(SPECIALS)),
    }
    return lambda decoder: HashModel(traits=traits_for(decoder), **options)


@st.composite
def prompts(draw: st.DrawFn, max_size: int = 5) -> list[Prompt]:
    """Draw prompts of any ids: mask, padding and ends among them."""
    tokens = st.lists(st.integers(0, VOCAB - 1) | st.just(MASK), min_size=1, max_size=11)
    return [
        Prompt(token_ids=tuple(ids), id=f"p{i}")
        for i, ids in enumerate(draw(st.lists(tokens, min_size=1, max_size=max_size)))
    ]


def temperatures() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.0, 1.0])


def weighs_rows(decoder: Decoder) -> bool:
    """Return whether the number of forward passes depends on the other prompts of a batch, which share their cost."""
    if isinstance(decoder, ReFusion):
        return decoder.infill == "bonus"
    return isinstance(decoder, SelfSpeculative) and decoder.layout is None


class LastState(GenerationCallback):
    """Keeps the state of every row, by the row's index."""

    def __init__(self) -> None:
        self.states: dict[int, RowState] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        self.states[index] = state


def check_output(
    model: FakeModel, requests: Sequence[Prompt], sampling: SamplingParams, output: DecodingOutput, watcher: LastState
) -> None:
    """Assert what every output must satisfy: allowed tokens, one EOS token at the end, consistent counts."""
    special = model.special_tokens
    never = {special.mask_token_id, special.pad_token_id} - set(special.eos_token_ids)
    for index, (prompt, row) in enumerate(zip(requests, output.rows, strict=True)):
        assert row.id == prompt.id
        assert 1 <= row.num_tokens <= sampling.max_new_tokens
        assert not never & set(row.token_ids)
        assert all(0 <= token < special.vocab_size for token in row.token_ids)
        assert not set(special.eos_token_ids) & set(row.token_ids[:-1]), "nothing follows an end"
        has_eos = row.token_ids[-1] in special.eos_token_ids
        assert row.finish_reason == ("eos" if has_eos else "length")
        assert has_eos or row.num_tokens == sampling.max_new_tokens
        state = watcher.states[index]
        assert state.prompt == prompt
        assert not any(state.is_masked[: row.num_tokens])
        assert state.tokens[: row.num_tokens] == row.token_ids
        assert all(1 <= count <= row.num_forwards for count in state.commit_rounds[: row.num_tokens])
        assert len(row.forward_shapes) == row.num_forwards >= 1
        assert row.num_positions <= sum(rows * length for rows, length in row.forward_shapes)
    assert output.num_calls == len(model.calls)
    assert output.num_positions == sum(call.input_ids.numel() for call in model.calls)
