"""Overhead: what part of decoding is spent outside the backbone's body and head, and where.

usage: python -m benchmarks.overhead [--repeats 5] [--threads 1]

Times of body and head are taken around the calls; what is left is ours. It is given as a share of the time with
transformers' body, and of the time with the fused one: the faster the body, the larger the share of the same overhead.
Where it goes is sampled from another thread, every 0.5 ms: the innermost function of this project that runs while
neither body nor head does.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import (
    VOCABULARY_HEAVY,
    Work,
    WrappedModel,
    aim,
    golden_model,
    golden_runs,
    random_model,
    random_prompts,
    with_library_body,
    write,
)
from benchmarks.peers import Variants, default_variants, ours, replayed
from benchmarks.replay import ALL_ACCEPTED, Replay
from jsonargparse import auto_cli
from torch import Tensor

import refusion_lit
from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.visibility import Visibility
from refusion_lit.types import Prompt

BODIES = ("transformers' body", "the fused body")

_PACKAGE = str(Path(refusion_lit.__file__).parent)


class TimedModel(WrappedModel):
    """A model that knows how long its body and its head took.

    Attributes:
        seconds: Of ``body`` and ``head``, so far.
        num_calls: Calls of the body, so far.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.reset()

    def reset(self) -> None:
        self.seconds = {"body": 0.0, "head": 0.0}
        self.num_calls = 0

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Visibility | Tensor | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        started = time.perf_counter()
        hidden = self.model.hidden_states(input_ids, position_ids, attention_mask, cache)
        self.seconds["body"] += time.perf_counter() - started
        self.num_calls += 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        started = time.perf_counter()
        logits = self.model.logits(hidden)
        self.seconds["head"] += time.perf_counter() - started
        return logits


def sampled(run: Callable[[], Any], repeats: int) -> Counter[str]:
    """Count where the time outside body and head goes while ``run`` is repeated."""
    counts: Counter[str] = Counter()
    watched, stop = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.0005):
            frame = sys._current_frames().get(watched)
            place = None
            while frame is not None:
                name, file = frame.f_code.co_name, frame.f_code.co_filename
                if name in ("hidden_states", "logits", "script"):
                    place = "model"
                    break
                if place is None and file.startswith(_PACKAGE):
                    place = f"{Path(file).stem}.{frame.f_code.co_qualname}"
                frame = frame.f_back
            if place is not None:
                counts[place] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(repeats):
        run()
    stop.set()
    thread.join()
    sys.setswitchinterval(interval)
    return counts


def measured(work: Work, outer: TimedModel, inner: TimedModel, repeats: int) -> dict[str, Any]:
    """Return the share of time outside body and head; what the replayed script itself costs is left out."""
    work.run()
    shares, parts = [], []
    for _ in range(repeats):
        outer.reset()
        inner.reset()
        started = time.perf_counter()
        work.run()
        total = time.perf_counter() - started
        replay = sum(outer.seconds.values()) - sum(inner.seconds.values())
        net = total - replay
        shares.append(1 - sum(inner.seconds.values()) / net)
        calls = inner.num_calls
        parts.append(
            {
                "body": inner.seconds["body"] / calls * 1e3,
                "head": inner.seconds["head"] / calls * 1e3,
                "outside": (net - sum(inner.seconds.values())) / calls * 1e3,
            }
        )
    where = sampled(work.run, repeats)
    model = where.pop("model", 0)
    num_samples = sum(where.values()) + model
    return {
        "share_outside": round(statistics.median(shares), 4),
        "milliseconds_a_call": {name: round(statistics.median(p[name] for p in parts), 4) for name in parts[0]},
        "where_outside": {name: round(count / num_samples, 4) for name, count in where.most_common(12)},
    }


def main(repeats: int = 5, threads: int = 1, variants: Variants | None = None, output: str | None = None) -> None:
    """Measure overhead.

    Args:
        repeats: How often each case is timed.
        threads: Threads of torch.
        variants: Options of ReFusion by name; the first is the one that aims are about.
        output: Where to write the JSON.
    """
    warnings.filterwarnings("ignore", message=".* does not fit this model")
    torch.set_num_threads(threads)
    started = time.perf_counter()
    variants = variants or default_variants()
    reference = golden_runs("clean")
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(reference["runs"][:32])]
    small_model, large_model = golden_model("clean"), random_model(VOCABULARY_HEAVY)
    replay = Replay(ALL_ACCEPTED, 32, VOCABULARY_HEAVY["vocab_size"] - 1)
    cases: dict[str, Any] = {}
    for body in BODIES:
        change = with_library_body if body == BODIES[0] else (lambda model: model)
        small, large = TimedModel(change(small_model)), TimedModel(change(large_model))
        acting = TimedModel(replayed(large, replay))  # type: ignore[arg-type]
        for name, more in variants.items():
            for size in (1, 16):
                work = ours(small, ReFusion(**more), prompts[: max(size, 8)], 64, size)
                case = f"additions-clean, setting 1, {name}, {body}, batch {size}"
                cases[case] = measured(work, small, small, repeats)
            for size in (1, 4):
                work = ours(acting, ReFusion(num_serial_blocks=1, **more), random_prompts(size, 32), 128, size)
                case = f"vocabulary-heavy, all accepted, {name}, {body}, batch {size}"
                cases[case] = measured(work, acting, large, repeats)
    main_variant = next(iter(variants))
    aims = [
        aim(f"time outside body and head, {label}, batch 1, share of the time with {body}",
            cases[f"{label}, {main_variant}, {body}, batch 1"]["share_outside"],
            bound, at_least=False)
        for label, bound in (("additions-clean, setting 1", 0.15), ("vocabulary-heavy, all accepted", 0.03))
        for body in BODIES
    ]  # fmt: skip
    config = {"repeats": repeats, "threads": threads, "variants": variants}
    seconds = time.perf_counter() - started
    write("overhead", config, {"aims": aims, "cases": cases}, output=output, seconds=seconds, seed=0)


if __name__ == "__main__":
    auto_cli(main)
