"""Host time of a call: what scheduling, layout and reading cost while the model itself does nothing.

usage: python -m benchmarks.host_time [--lengths '[256, 32768]'] [--batch_sizes '[1, 64]']

The body returns at once and the head returns zeros over 128 tokens, over which a schedule writes the text; the cache is
prepared and compacted, but nothing is stored. So all that is left is the host's work, in processor seconds of this
process: the median over the calls after the first one, which takes the prompts in.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common import WrappedModel, decoded, random_prompts, summary_line, write
from benchmarks.replay import ACCEPTED_IN_PARTS, Replay, ReplayedModel
from jsonargparse import auto_cli
from torch import Tensor

from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.types import ModelTraits, SpecialTokens

VOCABULARY = 129
DECODERS: dict[str, Decoder] = {"refusion": ReFusion(num_serial_blocks=1), "autoregressive": Autoregressive()}


class IdleModel(LanguageModel):
    """A model of two layers that computes nothing."""

    def __init__(self) -> None:
        self.traits = ModelTraits()
        self.special_tokens = SpecialTokens(
            mask_token_id=VOCABULARY - 1, eos_token_ids=(1,), pad_token_id=0, vocab_size=VOCABULARY
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def runner(self) -> Callable[..., Tensor]:
        return lambda ids, _positions, _mask, _cache=None: torch.zeros(*ids.shape, 1)

    def head_runner(self) -> Callable[..., Tensor]:
        return lambda hidden: hidden.new_zeros(*hidden.shape[:-1], VOCABULARY)

    def make_cache(self, num_rows: int) -> KVCache:
        return KVCache(2, num_rows)


class Clocked(WrappedModel):
    """Notes when each call starts, leaving out what the schedule itself takes."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.spans: list[float] = []
        self._left = time.process_time()

    def hidden_states(self, *args: Any) -> Tensor:
        self.spans.append(time.process_time() - self._left)
        hidden = self.run_body(*args)
        self._left = time.process_time()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.read(hidden)


def milliseconds_a_call(decoder: Decoder, length: int, batch_size: int, num_tokens: int) -> dict[str, float]:
    """Return the host's time between two calls of the model, and the number of calls."""
    idle = IdleModel()
    replay = Replay(ACCEPTED_IN_PARTS, length, VOCABULARY - 1)
    model = Clocked(ReplayedModel(idle, replay))
    prompts = random_prompts(batch_size, length)
    gc.collect()
    decoded(model, decoder, prompts, num_tokens, batch_size, share_prefixes=False)
    spans = model.spans[2:]
    return {"milliseconds": round(statistics.median(spans) * 1e3, 3), "num_calls": len(spans)}


def main(
    lengths: tuple[int, ...] = (256, 2048, 8192, 32768),
    batch_sizes: tuple[int, ...] = (1, 8, 64),
    num_tokens: int = 128,
    output: str | None = None,
) -> None:
    """Measure.

    Args:
        lengths: Tokens of the prompts, which are cached.
        batch_sizes: Prompts decoded at the same time.
        num_tokens: New tokens.
        output: Where to write the JSON.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    cases: dict[str, Any] = {}
    worst = 0.0
    for name, decoder in DECODERS.items():
        for batch_size in batch_sizes:
            milliseconds = {str(n): milliseconds_a_call(decoder, n, batch_size, num_tokens) for n in lengths}
            values = [one["milliseconds"] for one in milliseconds.values()]
            cases[f"{name}, batch {batch_size}"] = {"lengths": milliseconds, "growth": round(values[-1] / values[0], 2)}
            worst = max(worst, values[-1] / values[0])
            print(f"{name}, batch {batch_size}", values, flush=True)
    text = f"host time of a call with {lengths[-1]} cached entries over that with {lengths[0]}, at most"
    config = {"lengths": lengths, "batch_sizes": batch_sizes, "num_tokens": num_tokens}
    results = {"cases": cases, "summary": [summary_line(text, worst)]}
    write("host_time", config, results, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
