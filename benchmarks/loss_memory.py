"""Compare the peak memory of loss and backward: chunked, as in training, and the straightforward way.

Straightforward means float32 logits at every position, then one cross-entropy. Each way runs in a process of its
own; its extra memory is the peak during loss and backward above what hidden states and head take before. Every
position has a label, which is the worst case for the chunked way. On CUDA the allocator's peak is taken, else the
process's resident memory.

usage: python -m benchmarks.loss_memory [--batch 4] [--tokens 1024] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from benchmarks.common import write
from benchmarks.memory import peak_resident_bytes, resident_bytes
from torch.nn import functional as F

from refusion_lit.learning.objective import LOGITS_BYTES, chunked_cross_entropy

WAYS = ("straightforward", "chunked")


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run loss and backward once in this process.

    Args:
        way: One of ``WAYS``.
        options: Shapes and device.
    """
    torch.manual_seed(0)
    device = torch.device(options.device)
    shape = (options.batch, options.tokens)
    hidden = torch.randn(*shape, options.hidden, device=device, requires_grad=True)
    head = torch.nn.Linear(options.hidden, options.vocab, bias=False, device=device)
    labels = torch.randint(0, options.vocab, shape, device=device)
    ones, terms = torch.ones(shape, device=device), torch.zeros_like(labels)
    # A first small loss loads the kernels, whose memory is no part of the comparison.
    F.cross_entropy(head(hidden[0, :2]), labels[0, :2]).backward()
    hidden.grad = head.weight.grad = None

    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = resident_bytes()
    start = time.perf_counter()
    if way == "straightforward":
        loss = F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten())
    else:
        loss = chunked_cross_entropy(hidden, head, labels, ones, terms, num_terms=1).sum() / labels.numel()
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident_bytes()
    assert head.weight.grad is not None
    return {
        "extra_megabytes": round((after - before) / 2**20, 1),
        "seconds": round(seconds, 2),
        "loss": loss.item(),
        "gradient_norm": head.weight.grad.norm().item(),
    }


def measured_alone(way: str) -> dict[str, Any]:
    """Run :func:`measure` in a fresh process."""
    arguments = [sys.executable, "-m", "benchmarks.loss_memory", *sys.argv[1:], "--way", way]
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure both ways, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--tokens", type=int, default=1024, help="positions a row")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--vocab", type=int, default=151_936, help="rows of the head")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--output", help="where to write the JSON")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        sys.stdout.write(json.dumps(measure(options.way, options)))
        return
    started = time.perf_counter()
    ways = {way: measured_alone(way) for way in WAYS}
    shape = {name: getattr(options, name) for name in ("batch", "tokens", "hidden", "vocab")}
    extra = [ways[way]["extra_megabytes"] for way in ("chunked", "straightforward")]
    results = {
        "ways": ways,
        "chunked_over_straightforward": round(extra[0] / extra[1], 4),
        "logits_megabytes_a_chunk": LOGITS_BYTES / 2**20,
    }
    config = {"shape": shape, "device": options.device}
    write("loss_memory", config, results, output=options.output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    main()
