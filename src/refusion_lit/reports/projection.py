"""Projects counted model calls onto other models and devices: a calculation, not a measurement.

A roofline: a product takes the longer of two times, reading its weights or doing its operations. (On one CPU thread
they hardly overlap: there, a product takes the sum.) Products of the body, attention and the LM head are separate, and
every launch of an operation costs a fixed time. The projection assumes that the named model commits as many tokens per
call as the model that was run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from refusion_lit.engine.output import CallShapes
from refusion_lit.reports.comparison import compare
from refusion_lit.reports.rows import ReportRow, read_rows
from refusion_lit.reports.tables import Cell, escape_markdown, format_markdown
from refusion_lit.utils.require import require

LAUNCHES_PER_LAYER = 25
"""Operations of the fused backbone on a GPU: norms 6, queries, keys and values 4, rotation 3, cache 2, attention 1,
output 2, gate and up 3, activation 2, down 2."""

LAUNCHES_PER_HEAD = 4
"""Select positions, LM head, maximum, transfer."""

_LAUNCH_SECONDS = 3.8e-6
_LAUNCH_SOURCE = "launch: NVIDIA blog, Getting Started with CUDA Graphs (kernels of 2.9 us, launched without waiting)"


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a dense decoder-only model.

    Attributes:
        num_layers: Layers.
        hidden_size: Width of the hidden states.
        intermediate_size: Width of the gated MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        vocab_size: Number of token ids.
        source: Where the dimensions are published.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    source: str

    @property
    def num_body_weights(self) -> int:
        """Weights in the products of all layers."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights of the LM head."""
        return self.hidden_size * self.vocab_size

    @property
    def num_cache_values(self) -> int:
        """Keys and values of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_attention_operations(self) -> int:
        """Operations of a position that attends to one key, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Device:
    """Constants of a device.

    Attributes:
        bytes_per_second: Bandwidth of the memory that holds weights and cache.
        operations_per_second: Peak of dense products.
        launch_seconds: Fixed cost per launched operation.
        bytes_per_value: Bytes of a weight and of a cached value.
        overlaps: Whether reading and calculating overlap; if not, their times add up.
        source: Where the constants are published, or how they were measured.
    """

    bytes_per_second: float
    operations_per_second: float
    launch_seconds: float = _LAUNCH_SECONDS
    bytes_per_value: int = 2
    overlaps: bool = True
    source: str


# Layers, hidden size, intermediate size, query heads, key and value heads, head dimension, vocabulary.
MODELS: dict[str, ModelSize] = {
    "SmolLM2-135M": ModelSize(30, 576, 1536, 9, 3, 64, 49152, "config.json of HuggingFaceTB/SmolLM2-135M"),
    "Qwen3-0.6B": ModelSize(28, 1024, 3072, 16, 8, 128, 151936, "config.json of Qwen/Qwen3-0.6B"),
    "Qwen3-1.7B": ModelSize(28, 2048, 6144, 16, 8, 128, 151936, "config.json of Qwen/Qwen3-1.7B"),
    "Qwen3-4B": ModelSize(36, 2560, 9728, 32, 8, 128, 151936, "config.json of Qwen/Qwen3-4B"),
    "Qwen3-8B": ModelSize(36, 4096, 12288, 32, 8, 128, 151936, "config.json of Qwen/Qwen3-8B"),
    "LLaDA-8B": ModelSize(32, 4096, 12288, 32, 32, 128, 126464, "config.json of GSAI-ML/LLaDA-8B-Instruct"),
    "Dream-7B": ModelSize(28, 3584, 18944, 28, 4, 128, 152064, "config.json of Dream-org/Dream-v0-Instruct-7B"),
}
DEVICES: dict[str, Device] = {
    "A100": Device(
        bytes_per_second=2039e9, operations_per_second=312e12,
        source=f"NVIDIA A100 data sheet: 80 GB SXM, bfloat16 without sparsity; {_LAUNCH_SOURCE}",
    ),
    "H100": Device(
        bytes_per_second=3350e9, operations_per_second=989.4e12,
        source=f"NVIDIA H100 data sheet: SXM, bfloat16 without sparsity; {_LAUNCH_SOURCE}",
    ),
    "H200": Device(
        bytes_per_second=4800e9, operations_per_second=989.4e12,
        source=f"NVIDIA H200 data sheet: SXM, bfloat16 without sparsity; {_LAUNCH_SOURCE}",
    ),
    "RTX-4090": Device(
        bytes_per_second=1008e9, operations_per_second=165.2e12,
        source=f"NVIDIA Ada GPU architecture: bfloat16, float32 sums, without sparsity; {_LAUNCH_SOURCE}",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Predicted seconds for counted calls, by cause.

    >>> shapes = CallShapes()
    >>> shapes.add(num_sequences=1, num_positions=1, num_logits=1, cache_length=100)
    >>> round(1000 * project(shapes, MODELS["Qwen3-8B"], DEVICES["H100"]).body, 2)  # 7.0 billion weights of 2 bytes
    4.15

    Attributes:
        body: Products of the layers.
        attention: Attention over the cache.
        head: LM head.
        launches: Fixed costs.
    """

    body: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        """All parts together."""
        return self.body + self.attention + self.head + self.launches


def project(shapes: CallShapes, model: ModelSize, device: Device) -> Projection:
    """Return the predicted seconds of counted calls.

    Args:
        shapes: The calls.
        model: The model that makes them.
        device: The device that runs it.
    """

    def seconds(num_values: float, num_operations: float) -> float:
        reading = num_values * device.bytes_per_value / device.bytes_per_second
        calculating = num_operations / device.operations_per_second
        return max(reading, calculating) if device.overlaps else reading + calculating

    body = attention = head = launches = 0.0
    for (num_sequences, num_positions, num_logits), (num_calls, cache_length) in shapes.counts.items():
        # Both times are proportional to the cache length, so the sum over an entry's calls is exact.
        attention += seconds(
            num_sequences * cache_length * model.num_cache_values,
            num_positions * cache_length * model.num_attention_operations,
        )
        if num_positions:
            weights = model.num_body_weights
            body += num_calls * seconds(weights, 2 * weights * num_positions)
            launches += num_calls * model.num_layers * LAUNCHES_PER_LAYER * device.launch_seconds
        if num_logits:
            weights = model.num_head_weights
            head += num_calls * seconds(weights, 2 * weights * num_logits)
            launches += num_calls * LAUNCHES_PER_HEAD * device.launch_seconds
    return Projection(body=body, attention=attention, head=head, launches=launches)


def parse_target(text: str) -> tuple[str, ModelSize, Device]:
    """Read ``MODEL@DEVICE``; case does not matter.

    Returns:
        The names as the tables write them, the model and the device.

    Raises:
        ValueError: If the model or the device is unknown; the message names the known ones.
    """
    model, _, device = text.partition("@")
    models = {name.lower(): name for name in MODELS}
    devices = {name.lower(): name for name in DEVICES}
    expected = f"MODEL@DEVICE with a model of {', '.join(MODELS)} and a device of {', '.join(devices.values())}"
    is_known = model.lower() in models and device.lower() in devices
    require(is_known, "project", expected, text, "choose among these, Qwen3-8B@H100 for example")
    model, device = models[model.lower()], devices[device.lower()]
    return f"{model}@{device}", MODELS[model], DEVICES[device]


def projection_tables(paths: Sequence[str], targets: str, baseline: str | None = None) -> str:
    """Return Markdown tables of predicted speeds, a table per target.

    Args:
        paths: Runs and sweeps.
        targets: ``MODEL@DEVICE``, several separated by commas.
        baseline: A row, a decoder or an argument to compare with, as in a report; by default the first decoder of the
            class ``Autoregressive``, or else the report's default.

    Raises:
        ValueError: If a target is unknown, or no run has counted calls.
    """
    parsed = [parse_target(text.strip()) for text in targets.split(",")]
    rows, notes = read_rows(paths)
    plain = next((row.decoder for row in rows if row.decoder_class == "Autoregressive"), None)
    compare(rows, notes, baseline or plain)
    entries = [(row, *entry) for row in rows for entry in _list_calls(row)]
    fix = "run `refusion-lit test` again: it counts them"
    require(bool(entries), "project", f"runs with counted calls in {', '.join(paths)}", "runs without", fix)
    return "\n".join(_table(*target, entries) for target in parsed)


_Entry = tuple[ReportRow, str, int, CallShapes]


def _list_calls(row: ReportRow) -> Iterator[tuple[str, int, CallShapes]]:
    """Yield the row's counted calls: what was decoded, the number of committed tokens, and the calls."""
    lines = row.results["call_shapes"].get(row.decoder)
    if lines:
        name = f"test, up to {row.results['batch_size'] or '?'}"
        yield name, int(row.figures.get("num_tokens", 0)), _read_call_shapes(lines, row)
    for size, figures in row.latency.items():
        if figures.get("call_shapes"):
            yield f"batches of {size}", sum(figures["num_tokens"]), _read_call_shapes(figures["call_shapes"], row)


def _read_call_shapes(lines: Any, row: ReportRow) -> CallShapes:  # noqa: ANN401 - JSON
    try:
        return CallShapes.from_lines(lines)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{row.label}: call_shapes: expected lines of five whole numbers, got {lines!r:.80}; run the test again."
        ) from error


def _table(name: str, model: ModelSize, device: Device, entries: Sequence[_Entry]) -> str:
    """Return a target's table with its constants."""
    projections = {(row, batches): project(shapes, model, device) for row, batches, _, shapes in entries}
    speeds = {
        (row, batches): num_tokens / seconds if (seconds := projections[row, batches].seconds) else 0.0
        for row, batches, num_tokens, _ in entries
    }
    columns: dict[str, list[Cell]] = {}
    for row, batches, num_tokens, shapes in entries:
        projection, speed, base = projections[row, batches], speeds[row, batches], speeds.get((row.baseline, batches))
        num_calls = sum(calls for (_, positions, _), (calls, _) in shapes.counts.items() if positions)
        num_positions = sum(positions * calls for (_, positions, _), (calls, _) in shapes.counts.items())
        part, seconds = max(asdict(projection).items(), key=itemgetter(1))
        line = {
            "decoder": escape_markdown(row.label if row.options else row.title),
            "decoded": batches,
            "tokens/call": f"{num_tokens / max(num_calls, 1):.2f}",
            "positions/token": f"{num_positions / max(num_tokens, 1):.1f}",
            "predicted tokens/s": f"{speed:.0f}",
            "most time": f"{part} {100 * seconds / max(projection.seconds, 1e-30):.0f} %",
            "times baseline": f"{speed / base:.2f}" if base else "--",
        }
        for title, text in line.items():
            columns.setdefault(title, []).append((text,))
    note = (
        "A roofline of the counted calls, for a model that commits as many tokens per call as the tested model. Model: "
        f"{model.source}. Device: {device.bytes_per_second / 1e9:.4g} GB/s, "
        f"{device.operations_per_second / 1e12:.4g} TFLOPS, {device.launch_seconds * 1e6:.3g} us per launch "
        f"({device.source})."
    )
    return "\n".join([f"## {name}: predicted, not measured", "", format_markdown([*columns.items()]), "", note, ""])
