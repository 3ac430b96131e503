"""Language models for tests of decoders.

``OracleModel`` predicts a known text, so that text and forward passes follow from arithmetic. ``HashModel`` predicts a
hash of all tokens that a query sees, so that any mistake in tokens, positions, masks or cache changes the text.
``tiny_backbone`` is a transformer with random weights in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.drafter import Drafter, DrafterOptions
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.load import attach
from refusion_lit.modeling.visibility import Visibility, as_mask
from refusion_lit.types import ModelTraits, SpecialTokens

PAD, EOS, MASK = 0, 1, 2
VOCAB = 14
NUM_EXTRA_ROWS = 3
"""Number of the head's rows beyond the tokenizer's vocabulary."""
DRAFTS = tuple(range(VOCAB + NUM_EXTRA_ROWS, VOCAB + NUM_EXTRA_ROWS + 4))
"""Ids of a drafter's masks, beyond the embedding's rows."""
SPECIAL = SpecialTokens(
    mask_token_id=MASK, eos_token_ids=(EOS,), pad_token_id=PAD, vocab_size=VOCAB, draft_token_ids=DRAFTS
)
HYBRID = ModelTraits(predictions=("mask", "next_token_in_slot"))
NUM_LEVELS = 2
"""Levels of :class:`HashModel`, which stand for the layers of a transformer."""


@dataclass
class Call:
    """The inputs of a fake model's call."""

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    is_real: Tensor
    """Tokens that were stored; all tokens without a cache."""

    @property
    def fed(self) -> set[tuple[int, int]]:
        """Pairs of position and token, without padding."""
        return set(zip(self.position_ids[self.is_real].tolist(), self.input_ids[self.is_real].tolist(), strict=True))


class PlainModel(LanguageModel):
    """A model defined by ``hidden_states`` and ``logits``, without preparation for many calls."""

    def runner(self) -> Any:
        return self.hidden_states

    def head_runner(self) -> Any:
        return self.logits


class FakeModel(PlainModel):
    """Records its calls.

    Attributes:
        calls: The calls' inputs, in order.
        num_logit_rows: Number of tokens whose logits were computed.
    """

    forward_cost = 32.0  # positions that cost as much as starting a forward pass; any number would do

    def __init__(self, traits: ModelTraits = HYBRID, special: SpecialTokens = SPECIAL) -> None:
        self.traits, self.special_tokens = traits, special
        self.calls: list[Call] = []
        self.num_logit_rows = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_head_rows(self) -> int:
        return self.special_tokens.vocab_size + NUM_EXTRA_ROWS

    def predicted_positions(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the positions that the tokens' logits predict."""
        if "visible" in (self.traits.predictions or ()):
            return position_ids
        return position_ids + 1 - self.is_mask(input_ids)

    def is_mask(self, input_ids: Tensor) -> Tensor:
        """Return 1 at masks that predict their own position, if the model was trained for it."""
        mask, predictions = self.special_tokens.mask_token_id, self.traits.predictions
        if mask is None or not {"mask", "isolated_mask", "block_mask"} & set(predictions or ("mask",)):
            return torch.zeros_like(input_ids)
        return (input_ids == mask).long()

    def record(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, is_real: Tensor) -> None:
        assert input_ids.shape == position_ids.shape == mask.shape[:2] == is_real.shape
        assert ((input_ids >= 0) & (input_ids < self.num_head_rows + len(self.special_tokens.draft_token_ids))).all()
        assert (position_ids >= 0).all()
        assert mask.dtype == torch.bool
        assert mask.any(-1).all(), "a query without visible keys gives NaN"
        self.calls.append(Call(input_ids.clone(), position_ids.clone(), mask.clone(), is_real))


class OracleModel(FakeModel):
    """Predicts a given text, independently of its input.

    Args:
        text: Returns the token at a position.
        certainty: The token's probability, by position, if a mask predicts it; above chance.
        agreement: The token's probability, by position, if a clean token predicts it; above chance.
    """

    def __init__(
        self,
        text: Callable[[int], int],
        *,
        certainty: Callable[[int], float] = lambda _: 0.97,
        agreement: Callable[[int], float] = lambda _: 0.97,
        traits: ModelTraits = HYBRID,
        special: SpecialTokens = SPECIAL,
    ) -> None:
        super().__init__(traits, special)
        self.text, self.certainty, self.agreement = text, certainty, agreement

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Visibility | Tensor, cache=None
    ) -> Tensor:
        self.record(
            input_ids, position_ids, as_mask(attention_mask, self.device), torch.ones_like(input_ids, dtype=torch.bool)
        )
        predicted, is_drafted = self.predicted_positions(input_ids, position_ids), self.is_mask(input_ids)
        if "mask_shifted" in (self.traits.predictions or ()):
            is_drafted = torch.ones_like(input_ids)  # every token predicts like a mask
        return torch.stack([predicted, is_drafted], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows += len(hidden)
        places = hidden.tolist()
        values = [(self.certainty if is_drafted else self.agreement)(place) for place, is_drafted in places]
        chosen = torch.tensor(values, dtype=torch.float64)[:, None]
        rows = ((1 - chosen) / (self.num_head_rows - 1)).repeat(1, self.num_head_rows)
        return rows.scatter(1, torch.tensor([[self.text(place)] for place, _ in places]), chosen).log()

    def make_cache(self, num_rows: int) -> KVCache:
        return KVCache(0, num_rows)  # no layers: it keeps no state


def oracle_text(end: int | None, special: SpecialTokens = SPECIAL) -> Callable[[int], int]:
    """Return a text without structure, with an EOS token at ``end``; other tokens follow the EOS token."""
    never = {special.mask_token_id, special.pad_token_id, *special.eos_token_ids}
    ordinary = [token for token in range(special.vocab_size) if token not in never]
    return lambda place: special.eos_token_ids[0] if place == end else ordinary[place * place % 7 % len(ordinary)]


def scramble(values: Tensor) -> Tensor:
    """Hash int64 numbers, independently of the package's generator.

    Shifts and products by odd numbers mix all bits. The masks drop the copies of the sign that a shift fills in.
    """
    for multiplier in (-0x4B47D0C50AE85A3D, 0x2127599BF4325C37):
        values = (values ^ ((values >> 29) & 0x7FFFFFFFF)) * multiplier
    return values ^ ((values >> 32) & 0xFFFFFFFF)


def hashed_uniform(keys: Tensor, size: int) -> Tensor:
    """Return float64 numbers in [0, 1), a hash of the keys: ``size`` numbers per key, in a new last dimension."""
    numbers = scramble(scramble(keys)[..., None] + torch.arange(1, size + 1) * 0x9E3779B97F4A7C1)
    return (numbers & ((1 << 53) - 1)).double() * 2.0**-53  # float64 has 53 bits of precision


class HashCache:
    """A cache of hashes in place of keys and values. It asserts that calls are correct, which ``KVCache`` does not.

    Attributes:
        positions: Positions of the stored tokens (row, entry).
        is_written: Whether an entry was stored (row, entry).
        values: Hashes (level, row, entry).
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.capacity, self.num_bytes = num_rows, 1, 0
        self.positions = torch.zeros(num_rows, 0, dtype=torch.long)
        self.is_written = torch.zeros(num_rows, 0, dtype=torch.bool)
        self.values = torch.zeros(NUM_LEVELS, num_rows, 0, dtype=torch.long)

    def prepare(
        self, rows: list[int], num_keys: int, source_index: Tensor | None, row_index: Tensor, cache_index: Tensor
    ) -> None:
        missing = max(num_keys - self.positions.shape[1], 0)
        self.positions, self.is_written, self.values = (
            torch.nn.functional.pad(stored, (0, missing)) for stored in (self.positions, self.is_written, self.values)
        )
        assert all(0 <= row < self.num_rows for row in rows)
        assert ((cache_index >= 0) & (cache_index < num_keys)).all()
        targets = list(zip(row_index.tolist(), cache_index.tolist(), strict=True))
        assert len(set(targets)) == len(targets), "two tokens are stored at one place"
        self.rows, self.num_keys = rows, num_keys
        self.source_index: Tensor | slice = slice(None) if source_index is None else source_index
        self.target = (row_index, cache_index)

    def store_positions(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Write positions; return the positions that sequences may see, and which positions are written."""
        self.positions[self.target] = position_ids.flatten()[self.source_index]
        self.is_written[self.target] = True
        return self.positions[self.rows, : self.num_keys], self.is_written[self.rows, : self.num_keys]

    def update(self, level: int, states: Tensor) -> Tensor:
        """Write states; return the states that sequences may see."""
        self.values[level][self.target] = states.flatten()[self.source_index]
        return self.values[level][self.rows, : self.num_keys]

    def copy(self, source: int, target: int, length: int) -> None:
        assert self.is_written[source, :length].all(), "an entry is copied that does not exist"
        if source != target:
            for stored in (self.positions, *self.values):
                stored[target, :length] = stored[source, :length]
        self.is_written[target] = torch.arange(self.is_written.shape[1]) < length

    def compact(self, row: int, indices: Sequence[int], num_leading: int = 0) -> None:
        indices = [*range(num_leading), *indices]
        assert len(set(indices)) == len(indices)
        assert self.is_written[row, indices].all(), "an entry is kept that does not exist"
        for stored in (self.positions, *self.values):
            stored[row, : len(indices)] = stored[row, indices]
        self.is_written[row] = torch.arange(self.is_written.shape[1]) < len(indices)


class HashModel(FakeModel):
    """A model whose logits are a hash of all that a query sees, in two levels like the layers of a transformer.

    The first level hashes the visible tokens and positions; the second level hashes the first level's states of visible
    tokens. So a cache entry depends on the tokens that were visible when it was computed. Sums of integers have no
    rounding: equal inputs give exactly equal logits. A position has a favourite token, which masks and clean tokens
    predict often but not always, with varying confidence.

    Args:
        seed: Another seed gives another model.
        flavour: ``plain``; ``ties`` (few distinct logits); ``extreme`` (infinities and not-a-numbers, sometimes
            everywhere); ``banned`` (ids that must never be drawn are the most probable).
        ends: Positions whose favourite token is an EOS token.
        end_bias: Added to the logits of EOS tokens.
        traits: The model's traits.
        special: The special tokens.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        flavour: str = "plain",
        ends: frozenset[int] = frozenset(),
        end_bias: float = 0.0,
        traits: ModelTraits = HYBRID,
        special: SpecialTokens = SPECIAL,
    ) -> None:
        super().__init__(traits, special)
        self.seed, self.flavour, self.ends, self.end_bias = seed, flavour, ends, end_bias

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Visibility | Tensor,
        cache: HashCache | None = None,
    ) -> Tensor:
        mask = as_mask(attention_mask, self.device)
        if cache is None:
            is_real = torch.ones_like(input_ids, dtype=torch.bool)
            key_positions, is_written = position_ids, is_real
        else:
            is_real = torch.zeros(input_ids.numel(), dtype=torch.bool)
            is_real[cache.source_index] = True
            is_real = is_real.view_as(input_ids)
            key_positions, is_written = cache.store_positions(position_ids)
        self.record(input_ids, position_ids, mask, is_real)
        self.check_visible(mask, key_positions, is_written)
        states = scramble(scramble(input_ids + (self.seed << 20)) + position_ids)
        for level in range(NUM_LEVELS):
            seen = states if cache is None else cache.update(level, states)
            summed = (mask * scramble(seen + level)[:, None, :]).sum(-1)
            states = scramble(states + scramble(summed + 7919 * level))
        return torch.stack([states, self.predicted_positions(input_ids, position_ids)], -1)

    def check_visible(self, mask: Tensor, key_positions: Tensor, is_written: Tensor) -> None:
        assert not (mask & ~is_written[:, None, :]).any(), "a query sees an entry that was never written"
        places = torch.nn.functional.one_hot(key_positions, int(key_positions.max()) + 1)
        assert (mask.double() @ places.double()).max() <= 1, "a query sees two entries of one position"

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows += len(hidden)
        keys, predicted = hidden.unbind(-1)
        size, ends = self.num_head_rows, list(self.special_tokens.eos_token_ids)
        chance = hashed_uniform(keys, size)
        # Two more hashes of a row choose how far its logits lie apart, and how much its favourite token is preferred.
        choice = hashed_uniform(keys + 1, 2)
        sharpness = torch.tensor([1.0, 4.0, 12.0, 30.0], dtype=torch.float64)[(choice[:, 0] * 4).long()]
        bonus = torch.tensor([0.0, 4.0, 9.0, 25.0, 40.0], dtype=torch.float64)[(choice[:, 1] * 5).long()]
        if self.flavour == "ties":  # logits 0, 1 or 2, and 0 to 2 more for the favourite
            chance, sharpness, bonus = (chance * 3).floor(), torch.ones_like(sharpness), (bonus / 15).floor()
        logits = sharpness[:, None] * chance
        logits[:, ends] += self.end_bias
        logits[torch.arange(len(logits)), self.favourite(predicted)] += bonus
        if self.flavour == "extreme":
            of_logits, of_rows = hashed_uniform(keys + 2, size + 1).split([size, 1], dim=1)
            logits[of_logits < 0.4] = torch.nan
            logits[of_logits < 0.2] = torch.inf
            logits[of_logits < 0.1] = -torch.inf
            logits[of_rows[:, 0] < 0.2] = torch.nan
            logits[of_rows[:, 0] < 0.1] = -torch.inf
        if self.flavour == "banned":
            logits[:, list(self.special_tokens.banned_token_ids)] += 50
            logits[:, self.special_tokens.vocab_size :] += 60
        return logits

    def favourite(self, positions: Tensor) -> Tensor:
        """Return the positions' favourite tokens."""
        tokens = (scramble(positions + (self.seed << 24)) & 0xFFFF) % self.special_tokens.vocab_size
        is_end = torch.isin(positions, torch.tensor(sorted(self.ends), dtype=torch.long))
        return torch.where(is_end, self.special_tokens.eos_token_ids[-1], tokens)

    def make_cache(self, num_rows: int) -> HashCache:  # type: ignore[override]
        return HashCache(num_rows)


@cache
def tiny_qwen(num_rows: int = VOCAB + NUM_EXTRA_ROWS) -> torch.nn.Module:
    """Return a random Qwen3 in float64 whose logits are far from uniform."""
    config = Qwen3Config(
        vocab_size=num_rows,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.6,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def tiny_backbone(traits: ModelTraits = HYBRID, special: SpecialTokens = SPECIAL) -> Backbone:
    """Return a real backbone with random weights, and a drafter with random weights."""
    backbone = Backbone(copy.deepcopy(tiny_qwen()), traits, special)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        drafter = Drafter(backbone.body, DrafterOptions(num_masks=len(DRAFTS), rank=3))
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    attach(backbone, drafter.double())
    return backbone
