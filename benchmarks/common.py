"""What the benchmarks share: paired timing, memory, models, prompts, and results that say how they came about."""

from __future__ import annotations

import json
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refusion_lit.decoding import Decoder, DecodingOutput, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.interface import LanguageModel
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.reports.results import environment
from refusion_lit.types import AttentionKind, ModelTraits, Prompt, SamplingParams, SpecialTokens

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"
RESULTS = Path(__file__).parent / "results"

VOCABULARY_HEAVY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151_936,
}  # fmt: skip
"""Most of its time goes into the head, as in small models with the vocabularies of large ones."""


@dataclass
class Work:
    """One thing to time.

    Attributes:
        run: Does the work and says what came out of it (``num_tokens``, ``num_forwards``, ...).
        max_repeats: Slow work is repeated less.
        seconds: What each repeat took, by the clock chosen.
        wall_seconds: What it took on the wall.
        outcome: What the last repeat returned.
    """

    run: Callable[[], dict[str, Any]]
    max_repeats: int = 1_000
    seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    outcome: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return median seconds, rates and all repeats."""
        median = statistics.median(self.seconds)
        rates: dict[str, Any] = {}
        if "num_tokens" in self.outcome:
            rates["tokens_per_second"] = round(self.outcome["num_tokens"] / median, 2)
            if self.outcome.get("num_forwards"):
                rates["tokens_per_forward"] = round(self.outcome["num_tokens"] / self.outcome["num_forwards"], 3)
        shown = {name: value for name, value in self.outcome.items() if name != "text"}
        wall = {"median_wall_seconds": statistics.median(self.wall_seconds)}
        return {**shown, **rates, "median_seconds": median, **wall, "seconds": self.seconds}


def interleaved(
    works: Mapping[str, Work],
    repeats: int,
    *,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> None:
    """Time each work ``repeats`` times: every round runs all of them, in a new random order. A first run warms up.

    Other load on the machine then affects all of them alike, so ratios within a round are meaningful. On a busy machine
    and with one thread, pass ``time.process_time`` as the clock to count processor time alone.
    """
    clock = now if clock is None else clock
    rng = random.Random(seed)
    for work in works.values():
        work.run()
    for number in range(repeats):
        names = [name for name, work in works.items() if number < work.max_repeats]
        rng.shuffle(names)
        for name in names:
            started, started_on_wall = clock(), time.perf_counter()
            works[name].outcome = works[name].run()
            works[name].seconds.append(clock() - started)
            works[name].wall_seconds.append(time.perf_counter() - started_on_wall)


def now() -> float:
    """Return seconds on the wall, after all work of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def speed_ratio(fast: Work, slow: Work) -> float:
    """Return the ratio of two works' tokens per second: the median over the rounds they share."""
    tokens = fast.outcome["num_tokens"] / slow.outcome["num_tokens"]
    return statistics.median(s / f for f, s in zip(fast.seconds, slow.seconds, strict=False)) * tokens


def time_ratio(first: Work, second: Work) -> float:
    """Return the median over the rounds they share of one work's time over another's."""
    return statistics.median(a / b for a, b in zip(first.seconds, second.seconds, strict=False))


def summary_line(text: str, value: float) -> dict[str, Any]:
    """Return a figure that sums up a benchmark; :func:`write` prints it."""
    return {"figure": text, "value": round(value, 3)}


SMALL: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 512,
}  # fmt: skip


class WrappedModel(LanguageModel):
    """A model that does what another does; subclasses change ``hidden_states`` and ``logits``."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.run_body, self.read = model.runner(), model.head_runner()  # inspected once, as the engine does
        self.traits, self.special_tokens = model.traits, model.special_tokens
        self.max_positions, self.learns_positions = model.max_positions, model.learns_positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def runner(self) -> Any:
        return self.hidden_states

    def head_runner(self) -> Any:
        return self.logits

    def make_cache(self, num_rows: int) -> KVCache:
        return self.model.make_cache(num_rows)


_STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int:
    """Return a size that Linux reports of this process, ``VmRSS`` for example."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def resident_bytes() -> int:
    """Return the memory that this process holds now; on other systems than Linux, the most that it has held."""
    return status_bytes("VmRSS") if _STATUS.exists() else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held."""
    if _STATUS.exists():  # getrusage would count what the parent held before this program was started
        return status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    """Let :func:`peak_resident_bytes` start again from the memory held now (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def alone(module: str, function: str, **options: Any) -> Any:
    """Call a function of a benchmark in a process of its own, with JSON values in and out."""
    code = f"import json, sys; from benchmarks.{module} import {function} as run; "
    code += "print(json.dumps(run(**json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(options)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def decoded(
    model: LanguageModel, decoder: Decoder, prompts: Sequence[Prompt], num_tokens: int, batch_size: int = 1,
    **options: Any,
) -> DecodingOutput:  # fmt: skip
    """Decode prompts greedily; all benchmarks call the engine here.

    Args:
        model: The model.
        decoder: The decoder.
        prompts: The prompts.
        num_tokens: New tokens of each.
        batch_size: Prompts decoded at the same time.
        options: Further options of decoding: ``max_tokens_per_forward``, ``max_cache_tokens``, ``share_prefixes``.
    """
    sampling = SamplingParams(max_new_tokens=num_tokens)
    return decode(model, decoder, prompts, sampling, batch_size=batch_size, **options)


def golden_model(name: str, *, attention: AttentionKind = "causal") -> Backbone:
    """Load one of the small models that the reference outputs were made with."""
    from transformers import AutoTokenizer

    from refusion_lit.modeling.load import BackboneConfig

    directory = str(GOLDENS / "models" / f"additions-{name}")
    return BackboneConfig(source=directory, attention=attention).build(AutoTokenizer.from_pretrained(directory)).eval()


def golden_runs(name: str) -> dict[str, Any]:
    """Load settings and runs of a reference file."""
    return json.loads((GOLDENS / f"refusion_decode_{name}.json").read_text())


def expected_response(run: Mapping[str, Any]) -> list[int]:
    """Return the response of a reference run up to its end."""
    eos = 1  # of all models of the reference outputs
    output = run["output"]
    return output[: output.index(eos) + 1] if eos in output else output


def refusion_options(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return ReFusion's options in a setting of a reference file."""
    return {
        "slot_size": setting["slot_size"],
        "num_serial_blocks": setting["serial_num_blocks"],
        "slot_threshold": setting["slot_threshold"],
        "token_threshold": setting["token_threshold"],
    }


def random_model(
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: AttentionKind = "causal",
) -> Backbone:
    """Make a Qwen3-shaped model with random weights; its last id is the mask."""
    values: dict[str, Any] = {
        "tie_word_embeddings": True, "max_position_embeddings": 8192, "use_sliding_window": False,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "mask_token_id": options["vocab_size"] - 1,
        **options,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3", **values)
    with torch.random.fork_rng(devices=()), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    vocab = config.vocab_size
    special = SpecialTokens(mask_token_id=vocab - 1, eos_token_ids=(1,), pad_token_id=0, vocab_size=vocab)
    return Backbone(model, ModelTraits(attention=attention), special)


def with_library_body(model: Backbone) -> Backbone:
    """Return the same weights run by transformers' forward, never by the fused backbone."""
    return Backbone(model.model, model.traits, model.special_tokens, fused_body=False)


def random_prompts(number: int, length: int, *, seed: int = 0) -> list[Prompt]:
    """Draw prompts of plain tokens."""
    rng = random.Random(seed)
    return [Prompt(token_ids=tuple(rng.randrange(3, 128) for _ in range(length)), id=str(i)) for i in range(number)]


def write(
    name: str, config: Mapping[str, Any], results: Mapping[str, Any], *, output: str | None, seconds: float, seed: int
) -> None:
    """Write a result with all that it depends on; of absolute paths, the last part."""
    options = [re.sub(r"(^|=)/(?:[^/]+/)*", r"\1", option) for option in sys.argv[1:]]
    described = environment(seed, ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *options])
    path = Path(output) if output else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"config": dict(config), **results, "benchmark_seconds": round(seconds, 1), "environment": described}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for entry in results.get("summary", []):
        print(f"{entry['value']:8} {entry['figure']}", flush=True)


def draw(curves: Mapping[str, Mapping[int, float]], path: Path, x_name: str, y_name: str) -> None:
    """Draw curves by name over whole numbers, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure, axes = pyplot.subplots(figsize=(5.5, 3.5), layout="constrained")
    for name, values in curves.items():
        axes.plot(list(values), list(values.values()), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=x_name, ylabel=y_name)
    numbers = list(next(iter(curves.values())))
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
