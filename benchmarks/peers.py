"""The decoders that are compared, each as a function that decodes some prompts and counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.common import Work, decoded
from benchmarks.replay import Replay, ReplayedModel

from refusion_lit.decoding import Decoder, ReFusion
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.refusion import custom_generate
from refusion_lit.types import Prompt

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
        output = decoded(model, decoder, prompts, num_tokens, batch_size)
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
    """Return the work of decoding prompts with the plain ReFusion: the program that checkpoints export.

    It runs on transformers alone, one prompt at a time. A schedule is replayed by a hook that overwrites its logits.
    """

    def run() -> dict[str, Any]:
        num_forwards = 0

        def after(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
            nonlocal num_forwards
            num_forwards += 1
            if replay is not None:
                replay.overwrite(output.logits, kwargs["input_ids"], kwargs["position_ids"])

        known = {name: getattr(options, name) for name in custom_generate.OPTIONS}
        model.model.generation_config.refusion = {**known, "vocab_size": model.special_tokens.vocab_size}
        hook = model.model.register_forward_hook(after, with_kwargs=True)
        try:
            ids = [torch.tensor([prompt.token_ids], device=model.device) for prompt in prompts]
            plain = partial(custom_generate.generate, model=model.model, max_new_tokens=num_tokens)
            texts = [plain(one)[0, one.shape[1] :] for one in ids]
        finally:
            hook.remove()
        return {
            "num_prompts": len(prompts),
            "batch_size": 1,
            "num_tokens": sum(len(text) for text in texts),
            "num_forwards": num_forwards,
            "text": hash(tuple(tuple(text.tolist()) for text in texts)),
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
            output = model.model.generate(
                input_ids=ids, attention_mask=seen, max_new_tokens=num_tokens, do_sample=False, pad_token_id=pad
            )[:, width:]
            ended = torch.isin(output, torch.tensor(eos or [-1], device=output.device)).int()
            count += int((ended.cumsum(-1) - ended == 0).sum())
            num_forwards += output.numel()
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
