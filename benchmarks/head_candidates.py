"""Measure an approximate head that proposes candidates for the most probable token, and a bound that makes it exact.

HiRE (arXiv 2402.09360) as an exact method: a cheap copy of the head bounds every logit, the exact head scores the ids
with the highest bounds, and the choice is certain if it exceeds all other bounds. Otherwise the full head is needed.

usage: python -m benchmarks.head_candidates --model DIRECTORY --text FILE [--repeats 7] [--output FILE]

The model gives a real head and real hidden states, on which certificates depend; times are those of random weights of
151 936 ids, on which they do not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Work, interleaved, time_ratio, write
from jsonargparse import auto_cli
from torch import Tensor

VOCAB, HIDDEN = 151_936, 1024
"""Head of Qwen3-0.6B."""
RANKS = (64, 128, 256, 384)
NUM_CANDIDATES = (16, 64, 256, 1024, 4096)
NUM_POSITIONS = (1, 4, 16)


def compute_states(directory: str, text: str) -> tuple[Tensor, Tensor]:
    """Return a model's head and its hidden states of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)(text)["input_ids"][:257]])
    hidden = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0, 1:]
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    return head.weight, hidden


def bounds(weight: Tensor, hidden: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each cheap head its logits [position, id], and by how much the exact ones may exceed them."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round() * scale
    error = (weight - rounded).norm(dim=1)
    bounds = {"int8": (hidden @ rounded.T, hidden.norm(dim=1)[:, None] * error)}
    # The best basis of each rank; a residual is orthogonal to it, and meets only what it misses of the hidden state.
    basis = torch.linalg.eigh(weight.T @ weight).eigenvectors.flip(1)
    for rank in RANKS:
        some = basis[:, :rank]
        inside = hidden @ some @ some.T
        error = (weight - weight @ some @ some.T).norm(dim=1)
        bounds[f"rank {rank}"] = (inside @ weight.T, (hidden - inside).norm(dim=1)[:, None] * error)
    return bounds


def certificates(weight: Tensor, hidden: Tensor) -> list[dict[str, Any]]:
    """Return how often a number of candidates holds the best id, and how often the bound proves it."""
    exact, rows = hidden @ weight.T, []
    best = exact.argmax(1, keepdim=True)
    for name, (logits, slack) in bounds(weight, hidden).items():
        upper = logits + slack
        order, likely = upper.argsort(dim=1, descending=True), logits.argsort(dim=1, descending=True)
        for count in NUM_CANDIDATES:
            chosen = exact.gather(1, order[:, :count]).amax(1)
            proven = chosen > upper.gather(1, order[:, count : count + 1])[:, 0]
            assert (chosen == exact.amax(1))[proven].all(), "a certified choice is the head's"
            rows.append({
                "head": name, "candidates": count, "certified": round(proven.double().mean().item(), 3),
                "recall": round((likely[:, :count] == best).any(1).double().mean().item(), 3),
            })  # fmt: skip
    return rows


def times(repeats: int) -> list[dict[str, Any]]:
    """Return the time of full heads and of cheap ones with 256 candidates, for a few positions."""
    weight, rows = torch.randn(VOCAB, HIDDEN), []
    lowered, error, scale = weight.bfloat16(), torch.rand(VOCAB), torch.rand(VOCAB).bfloat16()
    integers = torch.randint(-127, 128, (VOCAB, HIDDEN), dtype=torch.int8)

    def chosen(hidden: Tensor, logits: Tensor, exact: Tensor) -> dict[str, Any]:
        upper = torch.addcmul(logits.float(), hidden.float().norm(dim=1)[:, None], error)
        order = upper.topk(257, dim=1).indices
        scores = torch.einsum("ph,pch->pc", hidden, exact[order])
        return {"token": order.gather(1, scores.argmax(1, keepdim=True))}

    for positions in NUM_POSITIONS:
        hidden = torch.randn(positions, HIDDEN)
        half = hidden.bfloat16()
        works = {
            "float32": Work(lambda z=hidden: {"token": (z @ weight.T).argmax(1)}),
            "bfloat16": Work(lambda z=half: {"token": (z @ lowered.T).argmax(1)}),
            "int8": Work(lambda z=half: chosen(z, torch._weight_int8pack_mm(z, integers, scale), lowered)),
        }
        for rank in RANKS:
            low, basis = torch.randn(VOCAB, rank), torch.randn(HIDDEN, rank)
            works[f"rank {rank}"] = Work(lambda z=hidden, a=low, b=basis: chosen(z, z @ b @ a.T, weight))
        interleaved(works, repeats, clock=time.process_time)
        for name, work in works.items():
            base = works["bfloat16" if name in ("int8", "bfloat16") else "float32"]
            rows.append({"positions": positions, "head": name, "milliseconds": round(min(work.seconds) * 1e3, 1),
                         "ratio": round(time_ratio(work, base), 3)})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main(model: str, text: str, repeats: int = 7, output: str | None = None) -> None:
    """Measure certificates and times.

    Args:
        model: Directory of a pretrained model.
        text: File whose first 257 tokens are read.
        repeats: Rounds of the interleaved timing.
        output: Where to write the JSON.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.perf_counter()
    with torch.no_grad():
        weight, hidden = compute_states(model, Path(text).read_text(encoding="utf-8"))
        figures = {"certificates": certificates(weight, hidden), "times": times(repeats)}
    config = {"head": list(weight.shape), "text": Path(text).name, "timed_head": [VOCAB, HIDDEN],
              "candidates": 256, "repeats": repeats}  # fmt: skip
    write("head_candidates", config, figures, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
