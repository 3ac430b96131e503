"""ReFusion as plainly as its description reads: what all speed-ups are measured against.

One prompt at a time; the head over the whole vocabulary at every place of every forward; two forwards a round; keys and
values copied to a new place in every step. Greedy. The text is the reference outputs' text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from refusion_lit.decoding import ReFusion
from refusion_lit.types import SpecialTokens

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Of every layer: [row, head, token, dim]."""


@dataclass
class Row:
    """A slot that is completed beside others."""

    slot: int
    tokens: list[int]
    num_accepted: int
    ends: bool = False


class PlainReFusion:
    """Reference implementation of ReFusion that decodes one prompt after the other.

    Args:
        model: A causal transformers model.
        special_tokens: Its special ids.
        options: Slot size, serial blocks and thresholds; other options are ignored.
        max_new_tokens: Maximum number of tokens returned.
        overwrite: Changes the logits of a forward in place, given its ids and positions.
    """

    def __init__(
        self,
        model: Any,
        special_tokens: SpecialTokens,
        options: ReFusion,
        max_new_tokens: int,
        overwrite: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.model, self.special, self.options, self.overwrite = model, special_tokens, options, overwrite
        self.max_new_tokens = max_new_tokens
        self.num_forwards = 0
        assert special_tokens.mask_token_id is not None
        self.mask = special_tokens.mask_token_id
        self.banned = [*special_tokens.banned_token_ids]

    @torch.no_grad()
    def decode(self, prompt: Sequence[int]) -> list[int]:
        """Return the response to a prompt, up to and including its end."""
        size, num_blocks = self.options.slot_size, self.options.num_serial_blocks
        num_slots = -(-self.max_new_tokens // (size * num_blocks)) * num_blocks
        self.prompt, self.text = list(prompt), {}
        self.context: KeysAndValues = []
        self.ended = False
        block_size = num_slots // num_blocks
        for block in range(num_blocks):
            self.remaining = list(range(block * block_size, (block + 1) * block_size))
            while self.remaining:
                self.round()
            if self.ended:
                break
        response: list[int] = []
        for place in range(self.max_new_tokens):
            response.append(self.text[place])
            if response[-1] in self.special.eos_token_ids:
                break
        return response

    def forward(
        self, tokens: list[list[int]], positions: list[list[int]], past: KeysAndValues
    ) -> tuple[Tensor, KeysAndValues]:
        """Run the model after ``past``; return logits and keys and values of everything, past included."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys.expand(len(tokens), -1, -1, -1), values.expand(len(tokens), -1, -1, -1), layer)
        device = self.model.device
        ids, places = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        past_length = past[0][0].shape[2] if past else 0
        seen = torch.ones(len(tokens), past_length + ids.shape[1], dtype=torch.long, device=device)
        output = self.model(
            input_ids=ids, position_ids=places, attention_mask=seen, past_key_values=cache, use_cache=True
        )
        self.num_forwards += 1
        logits = output.logits.float()
        if self.overwrite is not None:
            self.overwrite(logits, ids, places)
        return logits, [(layer.keys, layer.values) for layer in cache.layers]

    def best(self, logits: Tensor) -> Tensor:
        allowed = logits.clone()
        allowed[..., self.banned] = -torch.inf
        allowed[..., self.special.vocab_size :] = -torch.inf
        return allowed.argmax(-1)

    def places(self, slot: int) -> list[int]:
        return [slot * self.options.slot_size + i for i in range(self.options.slot_size)]

    def positions(self, slots: Sequence[int]) -> list[int]:
        return [len(self.prompt) + place for slot in slots for place in self.places(slot)]

    def round(self) -> None:
        size = self.options.slot_size
        chosen, drafts = self.plan()
        logits, after = self.forward([drafts], [self.positions(chosen)], self.context)
        probability = logits[0].softmax(-1)
        passes = [True] * len(drafts)
        for i, token in enumerate(drafts):
            if i % size:
                passes[i] = probability[i - 1, token].item() > self.options.token_threshold
        length = passes.index(False) if False in passes else len(passes)
        end = next((i for i in range(length) if drafts[i] in self.special.eos_token_ids), None)
        accepted = end + 1 if end is not None else length // size * size
        if accepted == 0:
            prefixes = [[*passes[i * size : (i + 1) * size], False].index(False) for i in range(len(chosen))]
            self.complete([Row(slot, drafts[i * size : (i + 1) * size], prefixes[i]) for i, slot in enumerate(chosen)])
            return
        kept = (self.context[0][0].shape[2] if self.context else 0) + accepted
        self.context = [(keys[:, :, :kept].clone(), values[:, :, :kept].clone()) for keys, values in after]
        places = [place for slot in chosen for place in self.places(slot)]
        self.text.update(zip(places[:accepted], drafts[:accepted], strict=True))
        taken = chosen[: -(-accepted // size)]
        self.leave(taken, ends=end is not None)

    def leave(self, taken: list[int], *, ends: bool) -> None:
        self.remaining = [s for s in self.remaining if s not in taken and not (ends and s > taken[-1])]
        self.ended |= ends

    def plan(self) -> tuple[list[int], list[int]]:
        size = self.options.slot_size
        prompt = [] if self.context else self.prompt
        tokens = prompt + [self.mask] * (len(self.remaining) * size)
        positions = list(range(len(prompt))) + self.positions(self.remaining)
        logits, after = self.forward([tokens], [positions], self.context)
        if not self.context:
            kept = len(prompt)
            self.context = [(keys[:, :, :kept].clone(), values[:, :, :kept].clone()) for keys, values in after]
        logits = logits[0, len(prompt) :]
        drafts = self.best(logits)
        certainty = logits.softmax(-1).gather(-1, drafts[:, None])[::size, 0].tolist()
        chosen = [i for i, value in enumerate(certainty) if value > self.options.slot_threshold]
        if not chosen:
            chosen = [max(range(len(certainty)), key=lambda i: (certainty[i], -i))]
        text = drafts.tolist()
        return [self.remaining[i] for i in chosen], [t for i in chosen for t in text[i * size : (i + 1) * size]]

    def complete(self, rows: list[Row]) -> None:
        size, cached = self.options.slot_size, 0
        context_length = self.context[0][0].shape[2]
        shared = self.context
        while True:
            positions = [self.positions([row.slot])[cached:] for row in rows]
            known = [size if row.ends else row.num_accepted for row in rows]
            tokens = [row.tokens[cached:n] + [self.mask] * (size - n) for row, n in zip(rows, known, strict=True)]
            proposals = self.best(self.forward(tokens, positions, shared)[0]).tolist()
            for row, n, proposal in zip(rows, known, proposals, strict=True):
                row.tokens[n:] = proposal[n - cached :]
            logits, after = self.forward([row.tokens[cached:] for row in rows], positions, shared)
            probability = logits.softmax(-1)
            for i, row in enumerate(rows):
                if row.ends or row.num_accepted == size:
                    continue
                row.num_accepted += 1
                while row.num_accepted < size:
                    before = row.num_accepted - 1 - cached
                    if not probability[i, before, row.tokens[row.num_accepted]] > self.options.token_threshold:
                        break
                    row.num_accepted += 1
            rows = self.find_end(rows, cached)
            done = all(row.ends or row.num_accepted == size for row in rows)
            fewest = min(size if row.ends else row.num_accepted for row in rows) - cached
            cached += fewest if done else fewest - 1
            kept = context_length + cached
            shared = [(k[: len(rows), :, :kept].clone(), v[: len(rows), :, :kept].clone()) for k, v in after]
            if done:
                break
        self.store(rows, shared, context_length)

    def find_end(self, rows: list[Row], cached: int) -> list[Row]:
        """Look for an end of sequence in the first row that has one; the rows after it leave."""
        for i, row in enumerate(rows):
            if row.ends:
                return rows[: i + 1]
            for j in range(cached, row.num_accepted):
                if row.tokens[j] in self.special.eos_token_ids:
                    row.num_accepted, row.ends = j + 1, True
                    return rows[: i + 1]
        return rows

    def store(self, rows: list[Row], shared: KeysAndValues, context_length: int) -> None:
        """Put the rows' keys and values after the context, as they are."""

        def joined(context: Tensor, states: Tensor) -> Tensor:
            parts = [states[i : i + 1, :, context_length:][:, :, : row.num_accepted] for i, row in enumerate(rows)]
            return torch.cat([context, *parts], dim=2)

        self.context = [
            (joined(keys, k), joined(values, v)) for (keys, values), (k, v) in zip(self.context, shared, strict=True)
        ]
        for row in rows:
            self.text.update(zip(self.places(row.slot), row.tokens[: row.num_accepted], strict=False))
        self.leave([row.slot for row in rows], ends=rows[-1].ends)
