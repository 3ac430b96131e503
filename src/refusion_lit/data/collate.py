"""From encoded examples to batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from refusion_lit.noise import stable_key
from refusion_lit.objectives.batch import ResponseBatch
from refusion_lit.types import Example, Prompt, PromptBatch


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example as token ids."""

    id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """An example whose prompt is to be decoded."""

    example: Example
    prompt_ids: Sequence[int]


def collate_responses(
    samples: Sequence[EncodedExample], pad_token_id: int, *, rows: Sequence[int] | None = None
) -> ResponseBatch:
    """Pad examples on the right to the longest of them; none give an empty batch.

    Args:
        samples: What to put together.
        pad_token_id: The padding.
        rows: Number of the row of each sample when samples are packed.
    """
    width = max((len(sample) for sample in samples), default=0)
    padded = [[*s.prompt_ids, *s.response_ids, *[pad_token_id] * (width - len(s))] for s in samples]
    return ResponseBatch(
        input_ids=torch.tensor(padded, dtype=torch.long).reshape(len(padded), width),
        prompt_lengths=torch.tensor([len(sample.prompt_ids) for sample in samples], dtype=torch.long),
        response_lengths=torch.tensor([len(sample.response_ids) for sample in samples], dtype=torch.long),
        sample_keys=torch.tensor([stable_key(sample.id) for sample in samples], dtype=torch.long),
        ids=[sample.id for sample in samples],
        rows=None if rows is None else torch.tensor(rows),
    )


def collate_prompts(samples: Sequence[EncodedPrompt]) -> PromptBatch:
    """Gather prompts; the engine needs no padding."""
    prompts = [Prompt(token_ids=tuple(sample.prompt_ids), id=sample.example.id) for sample in samples]
    return PromptBatch(prompts=prompts, examples=[sample.example for sample in samples])
