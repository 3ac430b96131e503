"""ReFusion without a cache: every forward pass computes the whole context of a single prompt.

This reference follows the paper's description of the algorithm; tests compare the decoder with it. It records the text
and the shapes of the forward passes that an implementation with a cache would run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from refusion_lit.decoding import RecomputeKV, ReFusion
from refusion_lit.modeling.interface import LanguageModel

Token = tuple[int, int]
"""A token and its position."""


@dataclass
class Row:
    """A slot during infill; several slots are filled in parallel."""

    slot: int
    tokens: list[int]
    num_accepted: int
    has_eos: bool = False


@dataclass
class SlowReFusion:
    """Greedy decoding of a prompt; see :meth:`run`.

    Attributes:
        model: The model.
        options: The decoder whose options are used.
        prompt: The prompt.
        max_new_tokens: Maximum number of new tokens.
        text: Tokens of the response by place.
        shapes: Sequences and tokens of the forward passes of a decoder with a cache.
        num_infills: Number of rounds that had to fill slots.
        num_infills_before_open_slots: Number of infills that found an EOS token while earlier slots were open.
    """

    model: LanguageModel
    options: ReFusion
    prompt: tuple[int, ...]
    max_new_tokens: int
    text: dict[int, int] = field(default_factory=dict)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    num_infills: int = 0
    num_infills_before_open_slots: int = 0

    def __post_init__(self) -> None:
        self.special = self.model.special_tokens
        self.context: list[Token] = []
        self.sees: list[set[int]] = []
        self.extend([(token, position) for position, token in enumerate(self.prompt)])
        self.has_ended = False

    # The model.

    def forward(self, row: list[Token]) -> list[list[float]]:
        """Return logits at the tokens of a row that follows the context."""
        tokens = [*self.context, *row]
        mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for query, seen in enumerate(self.sees):
            mask[query, sorted(seen)] = True
        for query in range(len(self.context), len(tokens)):
            mask[query, : query + 1] = True
        ids, positions = torch.tensor(tokens).T
        hidden = self.model.hidden_states(ids[None], positions[None], mask[None], None)
        return self.model.logits(hidden[0, len(self.context) :]).tolist()

    def best(self, logits: list[float]) -> int:
        banned = {self.special.mask_token_id, self.special.pad_token_id} - set(self.special.eos_token_ids)
        allowed = [token for token in range(self.special.vocab_size) if token not in banned]
        return max(allowed, key=lambda token: (logits[token], -token))

    @staticmethod
    def probability(logits: list[float], token: int) -> float:
        return float(torch.tensor(logits, dtype=torch.float64).softmax(-1)[token])

    # The state.

    def extend(self, row: list[Token]) -> None:
        """Append tokens to the context; a token sees all earlier tokens."""
        for token in row:
            self.context.append(token)
            self.sees.append(set(range(len(self.context))))

    def write(self, row: list[Token]) -> None:
        for token, position in row:
            place = position - len(self.prompt)
            assert place not in self.text
            self.text[place] = token

    def place_tokens(self, slot: int, tokens: list[int]) -> list[Token]:
        """Return a slot's tokens with their positions."""
        first = len(self.prompt) + slot * self.options.slot_size
        return [(token, first + i) for i, token in enumerate(tokens)]

    @property
    def response(self) -> list[int]:
        """The text up to its EOS token; a missing place before it raises KeyError."""
        tokens = []
        for place in range(self.max_new_tokens):
            tokens.append(self.text[place])
            if tokens[-1] in self.special.eos_token_ids:
                break
        return tokens

    # The algorithm.

    def run(self) -> SlowReFusion:
        size, num_blocks = self.options.slot_size, self.options.num_serial_blocks
        num_slots = math.ceil(self.max_new_tokens / (size * num_blocks)) * num_blocks
        for block in range(num_blocks):
            slots = [slot for slot in range(num_slots) if slot // (num_slots // num_blocks) == block]
            self.remaining = slots
            while self.remaining:
                self.round()
            if self.has_ended or (slots[-1] + 1) * size >= self.max_new_tokens:
                break
        return self

    def round(self) -> None:
        """Plan slots, verify their drafts together, and fill the slots whose drafts are not accepted."""
        size = self.options.slot_size
        chosen, drafts = self.plan()
        if self.options.infill == "bonus":
            self.bonus([Row(slot, drafts[slot], 1) for slot in chosen])
            return
        row = [token for slot in chosen for token in self.place_tokens(slot, drafts[slot])]
        logits = self.forward(row)
        self.shapes.append((1, len(row)))
        # The first token of a slot passes, because no token of the slot predicts it.
        passes = [
            i % size == 0 or self.probability(logits[i - 1], row[i][0]) > self.options.token_threshold
            for i in range(len(row))
        ]
        length = next((i for i, passed in enumerate(passes) if not passed), len(row))
        end = next((i for i in range(length) if row[i][0] in self.special.eos_token_ids), None)
        if end is not None:  # the text ends in an accepted slot: later slots are not needed
            self.accept(row[: end + 1])
            num_slots = end // size + 1
            last = chosen[num_slots - 1]
            self.remaining = [slot for slot in self.remaining if slot < last and slot not in chosen[:num_slots]]
            self.has_ended = True
        elif length >= size:  # whole slots are accepted
            num_slots = length // size
            self.accept(row[: num_slots * size])
            self.remaining = [slot for slot in self.remaining if slot not in chosen[:num_slots]]
        else:  # not even the first slot is: every slot keeps its tokens up to the first that did not pass
            passes_by_slot = [[*passes[i * size : (i + 1) * size], False] for i in range(len(chosen))]
            self.infill([Row(slot, drafts[slot], passes_by_slot[i].index(False)) for i, slot in enumerate(chosen)])

    def bonus(self, rows: list[Row]) -> None:
        """Fill slots that do not see each other. Shapes are not recorded."""
        rows = self.end_at_eos(rows)
        while unfilled := [row for row in rows if not self.is_filled(row)]:
            for row in unfilled:
                self.accept_bonus(row)
            rows = self.end_at_eos(rows)
        self.finish_infill(rows)

    def accept_bonus(self, row: Row) -> None:
        """Accept drafts up to the first refused draft, which the model's own token, the bonus, replaces."""
        logits = self.forward(self.place_tokens(row.slot, row.tokens))
        best = [0, *(self.best(values) for values in logits[:-1])]  # nothing predicts the first token
        while row.num_accepted < self.options.slot_size:
            j = row.num_accepted
            row.num_accepted += 1
            is_confident = self.probability(logits[j - 1], row.tokens[j]) > self.options.token_threshold
            if not is_confident and row.tokens[j] != best[j]:
                row.tokens[j:] = best[j:]
                break

    def is_filled(self, row: Row) -> bool:
        return row.has_eos or row.num_accepted == self.options.slot_size

    def end_at_eos(self, rows: list[Row]) -> list[Row]:
        """Cut the first row with an accepted EOS token after that token; return the rows up to this row."""
        for i, row in enumerate(rows):
            end = next((j for j in range(row.num_accepted) if row.tokens[j] in self.special.eos_token_ids), None)
            if end is not None:
                row.num_accepted, row.has_eos = end + 1, True
                return rows[: i + 1]
        return rows

    def accept(self, row: list[Token]) -> None:
        """Append tokens to context and text."""
        self.extend(row)
        self.write(row)

    def plan(self) -> tuple[list[int], dict[int, list[int]]]:
        """Draft all remaining slots; return the chosen slots, and the drafts by slot."""
        mask = self.special.mask_token_id
        assert mask is not None
        size, options = self.options.slot_size, self.options
        num_masks = size if options.num_drafts is None else min(size, 1 + options.num_drafts)
        row = [token for slot in self.remaining for token in self.place_tokens(slot, [mask] * num_masks)]
        logits = self.forward(row)
        self.shapes.append((1, len(row) + (0 if self.shapes else len(self.prompt))))
        drafts, certainties = {}, {}
        for i, slot in enumerate(self.remaining):
            slot_logits = logits[i * num_masks : (i + 1) * num_masks]
            best = [self.best(values) for values in slot_logits]
            confidences = [self.probability(values, token) for values, token in zip(slot_logits, best, strict=True)]
            drafts[slot] = [*best, *best[:1] * (size - num_masks)]
            certainties[slot] = {
                "first": confidences[0],
                "mean": sum(confidences) / len(confidences),
                "min": min(confidences),
                "product": math.prod(confidences),
            }[options.slot_confidence]
        ranking = sorted(self.remaining, key=lambda slot: (-certainties[slot], slot))
        certain = [slot for slot in ranking if certainties[slot] > options.slot_threshold]
        chosen = {
            "threshold": certain,
            "top_k": ranking[: options.k],
            "sequential": sorted(self.remaining)[: options.k or 1],
        }[options.selection]
        return sorted(chosen or ranking[:1]), drafts

    def infill(self, rows: list[Row]) -> None:
        """Fill slots in parallel until they are full or end the text."""
        size, num_cached, is_first = self.options.slot_size, 0, True
        self.num_infills += 1
        while not all(map(self.is_filled, rows)):
            num_forwards = self.mask_round(rows) if self.options.infill == "mask" else self.ar_round(rows, is_first)
            self.shapes += [(len(rows), size - num_cached)] * num_forwards
            is_first = False
            rows = self.end_at_eos(rows)
            # Every row caches equally many tokens. An unfilled row feeds its last accepted token again.
            min_accepted = min(size if row.has_eos else row.num_accepted for row in rows)
            num_cached = min_accepted if all(map(self.is_filled, rows)) else min_accepted - 1
        self.finish_infill(rows)

    def mask_round(self, rows: list[Row]) -> int:
        """Draft by masks, then verify; return the number of forward passes."""
        mask = self.special.mask_token_id
        assert mask is not None
        size = self.options.slot_size
        for row in rows:
            if self.is_filled(row):
                continue
            n = row.num_accepted
            logits = self.forward(self.place_tokens(row.slot, row.tokens[:n] + [mask] * (size - n)))
            row.tokens = row.tokens[:n] + [self.best(values) for values in logits[n:]]
            logits = self.forward(self.place_tokens(row.slot, row.tokens))
            row.num_accepted += 1
            self.accept_confident(row, logits)
        return 2

    def ar_round(self, rows: list[Row], is_first: bool) -> int:
        """Verify the drafts, and draft by next-token predictions; return the number of forward passes."""
        for row in rows:
            if self.is_filled(row):
                continue
            logits = self.forward(self.place_tokens(row.slot, row.tokens))
            if not is_first:
                row.num_accepted += 1
            self.accept_confident(row, logits)
            guesses = [self.best(values) for values in logits[row.num_accepted - 1 : -1]]
            row.tokens = row.tokens[: row.num_accepted] + guesses
        return 1

    def accept_confident(self, row: Row, logits: list[list[float]]) -> None:
        """Accept drafts up to the first draft below the threshold."""
        while row.num_accepted < self.options.slot_size:
            token, before = row.tokens[row.num_accepted], logits[row.num_accepted - 1]
            if not self.probability(before, token) > self.options.token_threshold:
                return
            row.num_accepted += 1

    def finish_infill(self, rows: list[Row]) -> None:
        """Append the filled slots to context and text.

        ``RecomputeKV`` computes their keys and values again, so that a slot sees the slots before it. Otherwise the
        cache keeps keys and values of the infill, where a slot saw the earlier context and itself.
        """
        shared = set(range(len(self.context)))
        added = [self.place_tokens(row.slot, row.tokens[: row.num_accepted]) for row in rows]
        if isinstance(self.options, RecomputeKV):
            self.shapes.append((1, sum(map(len, added))))
            for tokens in added:
                self.extend(tokens)
        else:
            for tokens in added:
                first = len(self.context)
                for i, token in enumerate(tokens):
                    self.context.append(token)
                    self.sees.append(shared | set(range(first, first + i + 1)))
        for tokens in added:
            self.write(tokens)
        self.remaining = [slot for slot in self.remaining if slot not in [row.slot for row in rows]]
        if rows[-1].has_eos:
            self.has_ended = True
            self.remaining = [slot for slot in self.remaining if slot < rows[-1].slot]
            self.num_infills_before_open_slots += bool(self.remaining)
