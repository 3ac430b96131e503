# ruff: noqa: ANN401 - transformers' classes
"""ReFusion decoding (arXiv 2512.13586) for transformers' ``generate``: one prompt, greedy, the KV cache reused.

refusion-lit copies this program into exported directories, as ``custom_generate/generate.py``, so that they decode
without refusion-lit:

    model.generate(ids, custom_generate=DIRECTORY, trust_remote_code=True, max_new_tokens=128)

Masks draft slots of ``slot_size`` tokens. Confident slots are verified together, left to right within a slot. The
rest of a slot is filled in after the context alone. Options come from the dictionary
``model.generation_config.refusion``; ``OPTIONS`` lists them. The text equals the text of refusion-lit's ``ReFusion``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from refusion_lit.modeling.config import sliding_window
from refusion_lit.modeling.custom_generate import read_options, read_request, respond

OPTIONS = {"slot_size": 8, "num_serial_blocks": 2, "slot_threshold": 0.9, "token_threshold": 0.9}


def generate(inputs: Any = None, generation_config: Any = None, *, model: Any, **kwargs: Any) -> torch.Tensor:
    """Return the prompt and the response [1, token].

    Args:
        inputs: The prompt's tokens [1, token]; ``input_ids`` in ``kwargs`` has the same meaning.
        generation_config: Options that are not in ``kwargs``; by default the model's generation config.
        model: A causal model trained with the hybrid objective, with ``mask_token_id`` in its config.
        kwargs: ``input_ids``, ``max_new_tokens``, ``max_length``, ``eos_token_id``, an ``attention_mask`` without
            zeros, and a ``streamer``, which receives the response as it becomes final.

    Raises:
        ValueError: If there is a second prompt, prompt and response exceed the context or a sliding window, or an
            option is unknown.
    """
    values = read_options(model, generation_config, kwargs)
    ids, limit, eos = read_request(model, inputs, values, kwargs)
    window = sliding_window(model.config.get_text_config())
    if window is not None and ids.shape[1] + limit > window:
        room = window - ids.shape[1]
        raise ValueError(
            f"max_new_tokens: expected at most {room}, the rest of the sliding window, got {limit}; lower it."
        )
    options = {**OPTIONS, **(getattr(model.generation_config, "refusion", None) or {})}
    unknown = {*options} - {*OPTIONS, "vocab_size", "unused_token_ids"}
    if unknown or min(options["slot_size"], options["num_serial_blocks"]) < 1:
        raise ValueError(f"refusion: expected {', '.join(OPTIONS)}, sizes from 1, got {options}; export again.")
    decoding = _Decoding(model, ids[0].tolist(), limit, options, eos)
    return respond(ids, decoding.run, kwargs.get("streamer"))


class _Decoding:
    """A prompt in flight. The cache contains the prompt and all accepted tokens, in the order of acceptance.

    Attributes:
        limit: Maximum number of tokens in the response.
        size: Tokens per slot.
        text: Accepted tokens by place, which is an index in the response.
        remaining: Slots of the current block that are not filled yet.
        has_ended: Whether an EOS token is accepted.
    """

    def __init__(self, model: Any, prompt: list[int], limit: int, options: dict[str, Any], eos: set[int]) -> None:
        self.model = model
        self.prompt = prompt
        self.limit = limit
        self.options = options
        self.size = options["slot_size"]
        self.cache = DynamicCache()  # with the config, layers with a sliding window could not forget drafts
        self.text = {}
        self.has_ended = False
        self.mask = model.config.mask_token_id
        self.eos = eos
        pad = model.config.pad_token_id
        excluded = {self.mask, pad, *options.get("unused_token_ids", ())}
        self.banned = [token for token in excluded - self.eos if token is not None]
        self.vocab_size = options.get("vocab_size") or model.config.vocab_size

    def run(self, streamer: Any = None) -> list[int]:
        """Return the response; send a streamer the final tokens after every round."""
        response: list[int] = []
        self.forward(self.prompt, range(len(self.prompt)), keep=len(self.prompt))
        num_blocks = min(self.options["num_serial_blocks"], -(-self.limit // self.size))
        block_slots = -(-self.limit // (self.size * num_blocks))
        for block in range(num_blocks):
            self.remaining = list(range(block * block_slots, (block + 1) * block_slots))
            while self.remaining:
                self.round()
                new = self.final(len(response))
                response += new
                if streamer is not None and new:
                    streamer.put(torch.tensor(new))
            if self.has_ended or (block + 1) * block_slots * self.size >= self.limit:
                break
        return response

    def final(self, start: int) -> list[int]:
        """Return the tokens from a place up to the first masked place, EOS or the limit."""
        tokens: list[int] = []
        while start < self.limit and start in self.text and self.text.get(start - 1) not in self.eos:
            tokens.append(self.text[start])
            start += 1
        return tokens

    def forward(self, tokens: list[int], positions: Any, keep: int = 0) -> torch.Tensor:
        """Return float32 logits [token, vocab] after the context; keep the first ``keep`` tokens in it."""
        length = self.cache.get_seq_length()
        device = self.model.device
        visible = torch.ones(1, 1, len(tokens), length + len(tokens), dtype=torch.bool, device=device).tril(length)
        if self.model.config._attn_implementation == "eager":  # which adds the mask to the scores
            scores = torch.zeros_like(visible, dtype=self.model.dtype)
            visible = scores.masked_fill(~visible, torch.finfo(self.model.dtype).min)
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([list(positions)], device=device),
            attention_mask=visible,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits = output.logits[0].float()
        self.forget(len(tokens) - keep)
        return logits

    def forget(self, num_tokens: int) -> None:
        """Remove the last tokens from the cache."""
        if num_tokens:
            self.cache.crop(-num_tokens)

    def best(self, logits: torch.Tensor) -> list[int]:
        """Return the most probable tokens that may be written."""
        logits = logits.clone()
        logits[:, self.banned] = -torch.inf
        logits[:, self.vocab_size :] = -torch.inf  # padding rows of the LM head
        return logits.argmax(-1).tolist()

    def places(self, slots: list[int]) -> list[int]:
        """Return the indices of the slots' tokens in the response."""
        return [slot * self.size + i for slot in slots for i in range(self.size)]

    def positions(self, slots: list[int]) -> list[int]:
        """Return the position ids of the slots' tokens."""
        return [len(self.prompt) + place for place in self.places(slots)]

    def round(self) -> None:
        """Plan, verify together, accept whole slots or fill in the chosen slots."""
        drafts, chosen = self.plan()
        size = self.size
        tokens = [token for slot in chosen for token in drafts[slot]]
        logits = self.forward(tokens, self.positions(chosen), keep=len(tokens))
        is_accepted = [i % size == 0 or self.passes(logits[i - 1], token) for i, token in enumerate(tokens)]
        length = is_accepted.index(False) if False in is_accepted else len(tokens)
        end = next((i for i in range(length) if tokens[i] in self.eos), None)
        num_accepted = length // size * size if end is None else end + 1
        self.forget(len(tokens) - num_accepted)
        if num_accepted:
            self.text.update(zip(self.places(chosen)[:num_accepted], tokens[:num_accepted], strict=True))
            self.drop(chosen[: -(-num_accepted // size)], end is not None)
            return
        prefixes = [[*is_accepted[i : i + size], False].index(False) for i in range(0, len(tokens), size)]
        self.fill(chosen, [drafts[slot] for slot in chosen], prefixes)

    def drop(self, slots: list[int], ends: bool) -> None:
        """Remove filled slots from the remaining slots, and all later slots if the text ends."""
        self.remaining = [s for s in self.remaining if s not in slots and not (ends and s > slots[-1])]
        self.has_ended = self.has_ended or ends

    def passes(self, logits: torch.Tensor, token: int) -> bool:
        """Return whether a token's probability is above the threshold."""
        return float(logits.softmax(-1)[token]) > self.options["token_threshold"]

    def plan(self) -> tuple[dict[int, list[int]], list[int]]:
        """Draft all remaining slots; choose slots above the threshold, or the most confident slot."""
        logits = self.forward([self.mask] * (len(self.remaining) * self.size), self.positions(self.remaining))
        tokens = self.best(logits)
        drafts = {slot: tokens[i * self.size : (i + 1) * self.size] for i, slot in enumerate(self.remaining)}
        first = logits[:: self.size].softmax(-1)
        confidence = {slot: float(first[i, drafts[slot][0]]) for i, slot in enumerate(self.remaining)}
        chosen = [slot for slot in self.remaining if confidence[slot] > self.options["slot_threshold"]]
        return drafts, chosen or [max(self.remaining, key=lambda slot: (confidence[slot], -slot))]

    def fill(self, slots: list[int], drafts: list[list[int]], accepted: list[int]) -> None:
        """Fill in slots in turn, every slot after the context alone, until all are full or the text ends."""
        ends = [False] * len(slots)
        num_checked = 0  # tokens per slot that were searched for EOS
        while any(n < self.size and not end for n, end in zip(accepted, ends, strict=True)):
            for i, slot in enumerate(slots):
                if accepted[i] == self.size or ends[i]:
                    continue
                n = accepted[i]
                positions = self.positions([slot])
                logits = self.forward(drafts[i][:n] + [self.mask] * (self.size - n), positions)
                drafts[i] = drafts[i][:n] + self.best(logits[n:])
                logits = self.forward(drafts[i], positions)
                accepted[i] += 1
                while accepted[i] < self.size and self.passes(logits[accepted[i] - 1], drafts[i][accepted[i]]):
                    accepted[i] += 1
            for i in range(len(slots)):
                end = next((j for j in range(num_checked, accepted[i]) if drafts[i][j] in self.eos), None)
                if end is not None:
                    accepted[i] = end + 1
                    ends[i] = True
                    for values in (slots, drafts, accepted, ends):
                        del values[i + 1 :]
                    break
            num_checked = max(min(self.size if end else n for n, end in zip(accepted, ends, strict=True)) - 1, 0)
        self.store(slots, [tokens[:n] for tokens, n in zip(drafts, accepted, strict=True)])
        self.drop(slots, ends[-1])

    def store(self, slots: list[int], rows: list[list[int]]) -> None:
        """Append filled slots to the context; a slot's KV cache entries see the old context and the slot only."""
        length = self.cache.get_seq_length()
        entries = []
        layers: Any = self.cache.layers
        for slot, tokens in zip(slots, rows, strict=True):
            self.forward(tokens, self.positions([slot])[: len(tokens)], keep=len(tokens))
            entries.append([(layer.keys[:, :, length:], layer.values[:, :, length:]) for layer in layers])
            self.forget(len(tokens))
            self.text.update(zip(self.places([slot]), tokens, strict=False))
        for number, parts in enumerate(zip(*entries, strict=True)):
            keys, values = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
            self.cache.update(keys, values, number)
