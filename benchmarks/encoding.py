"""Encoding: how long a training sample takes to encode, by the number of the tokenizer's added tokens.

usage: python -m benchmarks.encoding [--repeats 5]

A character tokenizer with 262 144 characters, the vocabulary size of Gemma 3, gets as many special tokens as the
tokenizers of Llama 3 (256), of Mistral (1 000) and of Gemma 3 (6 400) have. A sheet of three sums is encoded as a
training sample, with the added tokens read once, as the package does, and read anew for every sample. Seconds are
processor time of this process, one thread.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import torch
from benchmarks.common import Work, interleaved, summary_line, write
from jsonargparse import auto_cli
from transformers import PreTrainedTokenizerBase

from refusion_lit.data import added_tokens
from refusion_lit.data.examples import encode_example
from refusion_lit.data.tokenizers import CharacterTokenizer
from refusion_lit.tasks import Sheet

NUM_ADDED = (0, 256, 1000, 6400)
NUM_CHARACTERS = 262_144
NUM_SAMPLES = 20


def build(num_added: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer with so many further special tokens."""
    further = "".join(map(chr, range(0x10000, 0x10000 + NUM_CHARACTERS)))
    tokenizer = CharacterTokenizer(characters=Sheet().characters() + further).build(None)
    tokenizer.add_tokens([f"<|reserved_{number}|>" for number in range(num_added)], special_tokens=True)
    return tokenizer


def encoding(num_added: int, *, read_once: bool) -> Work:
    """Return the work of encoding samples."""
    tokenizer = build(num_added)
    examples = cycle(Sheet(num_terms=3).examples("test")[:NUM_SAMPLES])

    def encode() -> dict[str, Any]:
        for _ in range(NUM_SAMPLES):
            if not read_once:
                added_tokens._read.clear()
            encode_example(tokenizer, next(examples))
        return {}

    return Work(encode)


def main(repeats: int = 5, output: str | None = None) -> None:
    """Measure encoding.

    Args:
        repeats: How often the samples are encoded.
        output: Where to write the JSON.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    ways = {"read once": True, "read anew": False}
    works = {(number, way): encoding(number, read_once=once) for number in NUM_ADDED for way, once in ways.items()}
    interleaved({f"{number}, {way}": work for (number, way), work in works.items()}, repeats, clock=time.process_time)
    cases = {
        str(number): {way: round(works[number, way].summary()["median_seconds"] / NUM_SAMPLES * 1e3, 3) for way in ways}
        for number in NUM_ADDED
    }
    summary = [
        summary_line(f"ms per sample, {number} added tokens, {way}", value)
        for number, case in cases.items()
        for way, value in case.items()
    ]
    results = {"summary": summary, "milliseconds_per_sample": cases}
    config = {"repeats": repeats, "characters": NUM_CHARACTERS, "samples": NUM_SAMPLES, "threads": 1}
    write("encoding", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
