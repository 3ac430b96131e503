"""The decoders that are compared, each as a function that decodes some prompts and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.common import Work
from benchmarks.plain_refusion import PlainReFusion
from benchmarks.replay import Replay, ReplayedModel

from refusion_lit.decoding import Decoder, ReFusion, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.types import Prompt, SamplingParams

Variants = dict[str, dict[str, Any]]
"""Options of ReFusion by the name that results show."""


def default_variants() -> Variants:
    """Return ReFusion as it decodes by default, and with the forwards that the paper counts."""
    return {"refusion": {}, "reference forwards": {"fused": False, "infill_layout": "reference"}}


def replayed(model: Backbone, replay: Replay | None) -> LanguageModel:
    """Return a model that follows a schedule, or the model itself."""
    return model if replay is None else ReplayedModel(model, replay)


def ours(
    model: LanguageModel, decoder: Decoder, prompts: Sequence[Prompt], num_tokens: int, batch_size: int = 1,
    max_repeats: int = 1_000,
) -> Work:  # fmt: skip
    """Return the work of decoding prompts with one of our decoders."""

    def run() -> dict[str, Any]:
        sampling = SamplingParams(max_new_tokens=num_tokens)
        output = decode(model, decoder, prompts, sampling, max_batch_size=batch_size)
        return {
            "num_prompts": len(prompts),
            "batch_size": batch_size,
            "num_tokens": sum(row.num_tokens for row in output.rows),
            "num_forwards": sum(row.num_forwards for row in output.rows),
            "num_calls": output.num_calls,
            "num_positions": output.num_positions,
            "text": hash(tuple(tuple(row.token_ids) for row in output.rows)),
        }

    return Work(run, max_repeats)


def plain(
    model: Backbone, options: ReFusion, prompts: Sequence[Prompt], num_tokens: int, replay: Replay | None = None,
    max_repeats: int = 1_000,
) -> Work:  # fmt: skip
    """Return the work of decoding prompts with the plain ReFusion."""
    overwrite: Callable[..., None] | None = None if replay is None else replay.overwrite

    def run() -> dict[str, Any]:
        decoder = PlainReFusion(model.model, model.special_tokens, options, num_tokens, overwrite)
        texts = [decoder.decode(prompt.token_ids) for prompt in prompts]
        return {
            "num_prompts": len(prompts),
            "batch_size": 1,
            "num_tokens": sum(len(text) for text in texts),
            "num_forwards": decoder.num_forwards,
            "text": hash(tuple(tuple(text) for text in texts)),
        }

    return Work(run, max_repeats)


def library(
    model: Backbone, prompts: Sequence[Prompt], num_tokens: int, batch_size: int = 1, max_repeats: int = 1_000,
    *, ends: bool = False,
) -> Work:  # fmt: skip
    """Return the work of transformers' ``generate``, greedy, with its cache.

    Args:
        model: The model.
        prompts: The prompts.
        num_tokens: Tokens of an answer, at most.
        batch_size: Prompts that start together; the next ones start when all of them have ended.
        max_repeats: Repeats at most.
        ends: Let answers end at an end-of-sequence token, after which none is counted; else they never end early.
    """
    pad, eos = model.special_tokens.pad_token_id, list(model.special_tokens.eos_token_ids) if ends else None

    @torch.no_grad()
    def run() -> dict[str, Any]:
        model.model.generation_config.eos_token_id = eos
        count = num_forwards = 0
        for start in range(0, len(prompts), batch_size):
            rows = [prompt.token_ids for prompt in prompts[start : start + batch_size]]
            width = max(map(len, rows))
            ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device)
            seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
            found = model.model.generate(
                input_ids=ids, attention_mask=seen, max_new_tokens=num_tokens, do_sample=False, pad_token_id=pad
            )[:, width:]
            ended = torch.isin(found, torch.tensor(eos or [-1], device=found.device)).int()
            count += int((ended.cumsum(-1) - ended == 0).sum())
            num_forwards += found.numel()
        return {
            "num_prompts": len(prompts),
            "batch_size": batch_size,
            "num_tokens": count,
            "num_forwards": num_forwards,
        }

    return Work(run, max_repeats)


def check_same_text(works: dict[str, Work]) -> None:
    """Refuse figures of decoders that should have given the same text and did not."""
    texts = {work.outcome["text"] for work in works.values()}
    if len(texts) != 1:
        raise RuntimeError(f"expected the same text from {', '.join(works)}, got {len(texts)} different ones")
