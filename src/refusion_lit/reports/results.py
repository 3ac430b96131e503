"""The files that describe a run: ``results.json``, ``config.yaml`` and ``environment.json`` (versions, hardware)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

from refusion_lit.utils.files import read_yaml
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import is_number, require
from refusion_lit.version import __version__

RESULTS = "results.json"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
_PACKAGES = ("torch", "lightning", "torchmetrics", "transformers", "tokenizers", "jsonargparse", "numpy")
_MAPPINGS = (
    "latency_results", "call_shapes", "sampling", "fingerprints", "config", "decoders", "mismatches", "environment",
)  # fmt: skip
"""Fields in ``results.json`` that hold mappings, which may be missing or null."""
_MAX_TEXT_LENGTH = 2000
"""Longer texts in a config are cut: a stored tokenizer's files have millions of characters."""
_NUM_KEPT = 100
NUM_CONCURRENT = "REFUSION_LIT_NUM_CONCURRENT"
"""Environment variable in which a sweep passes how many points share the machine."""
CONCURRENT = "Speeds are left out: points ran concurrently and slowed each other down (launcher.num_workers)."
SHORT_SECONDS = 5.0
"""Decodes below this time have uncertain speeds."""
SHORT = "tokens/s was measured once, in few seconds, and varies: to compare speeds, set latency (docs/metrics.md)."
_SPEEDS = ("tokens_per_second", "latency_median", "latency_p95", "seconds")


def read_results(path: Path) -> dict[str, Any] | None:
    """Read a ``results.json``; missing fields become empty. Return ``None`` if another program wrote the file.

    Speeds are left out if the test ran beside other points of a sweep.

    Raises:
        ValueError: If the file cannot be read, or a field has another type.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); restore the file or remove it.") from error
    figures = values.get("results") if isinstance(values, dict) else None
    if not isinstance(figures, dict) or not figures:
        return None
    if not all(isinstance(by_figure, dict) and "score" in by_figure for by_figure in figures.values()):
        return None
    for name, value, kind in _list_fields(values):
        fix = "correct the field, or run `refusion-lit test` again"
        require(_KINDS[kind](value), f"{path}: {name}", kind, value, fix)
    mappings = {name: values.get(name) or {} for name in _MAPPINGS}
    results = {"batch_size": None, **values, **mappings, "metrics": values.get("metrics") or []}
    for by_figure in figures.values() if ran_concurrently(results) else ():
        for name in _SPEEDS:
            by_figure.pop(name, None)
    return results


def _list_fields(values: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Yield the names of fields with their values and the kinds that they must have; null counts as missing."""
    yield from ((name, values.get(name) or {}, "a mapping") for name in _MAPPINGS)
    yield from ((f"decoders.{name}", value, "a mapping") for name, value in (values.get("decoders") or {}).items())
    for name, figures in values["results"].items():
        yield from ((f"results.{name}.{figure}", value, "a number") for figure, value in figures.items())
    yield "batch_size", 0 if values.get("batch_size") is None else values["batch_size"], "a number"
    yield "metrics", values.get("metrics") or [], "a list of names"


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a number": lambda value: is_number(value, Real),
    "a mapping": lambda value: isinstance(value, dict),
    "a list of names": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
}


def ran_concurrently(results: Mapping[str, Any]) -> bool:
    """Return whether a test ran beside other sweep points, by its ``results.json``."""
    return (get_nested(results, "environment.num_concurrent") or 1) != 1


def note_on_speeds(results: Mapping[str, Any]) -> str | None:
    """Return why speeds in a ``results.json`` are missing or uncertain; ``None`` if neither holds."""
    if read_latency(results):
        return None
    if ran_concurrently(results):
        return CONCURRENT
    seconds = [figures["seconds"] for figures in results["results"].values() if figures.get("seconds")]
    return SHORT if min(seconds, default=SHORT_SECONDS) < SHORT_SECONDS else None


def read_latency(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return speeds that were measured in turns, by decoder and batch size; empty if none were measured.

    Every entry has ``tokens_per_second`` and ``times_baseline``, an estimate with the ends of its 95 % interval.
    """
    return get_nested(results, "latency_results.decoders") or {}


def is_speed_baseline(latency: Mapping[str, Mapping[str, Any]] | None) -> bool:
    """Return whether these are the baseline's speeds, by which other speeds were divided.

    Args:
        latency: A decoder's entry of :func:`read_latency`, by batch size.
    """
    return bool(latency) and all(figures["times_baseline"] == [1.0, 1.0, 1.0] for figures in latency.values())


def read_run_config(directory: Path) -> dict[str, Any] | None:
    """Read a run's resolved config and cut long texts; return ``None`` without a config.

    Raises:
        ValueError: If the file is damaged.
    """
    path = directory / CONFIG
    return _cut_texts(read_yaml(path, "config")) if path.is_file() else None


def _cut_texts(value: Any) -> Any:  # noqa: ANN401 - YAML
    """Return a config with its long texts cut."""
    if isinstance(value, dict):
        return {name: _cut_texts(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_cut_texts(inner) for inner in value]
    if isinstance(value, str) and len(value) > _MAX_TEXT_LENGTH:
        return f"{value[:_NUM_KEPT]} ... ({len(value)} characters)"
    return value


def shorten_value(value: Any) -> str:  # noqa: ANN401 - an option's value
    """Return an option's value as text, cut to 40 characters."""
    text = format_value(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def format_options(options: Mapping[str, Any]) -> str:
    """Return options as ``name=value``, without the groups in their names.

    >>> format_options({"model.decoders.a.slot_size": 4, "seed_everything": 1})
    'slot_size=4, seed_everything=1'
    """
    return ", ".join(f"{name.rpartition('.')[2]}={shorten_value(value)}" for name, value in options.items())


def format_value(value: Any) -> str:  # noqa: ANN401 - an option's value
    """Return an option's value as text; a component is written ``Class(option=value)``.

    >>> format_value({"class_path": "refusion_lit.decoding.ReFusion", "init_args": {"slot_size": 4}})
    'ReFusion(slot_size=4)'
    """
    if isinstance(value, Mapping) and "class_path" in value:
        arguments = ", ".join(f"{name}={format_value(inner)}" for name, inner in (value.get("init_args") or {}).items())
        name = str(value["class_path"]).rpartition(".")[2]
        return f"{name}({arguments})" if arguments else name
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {format_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def environment(seed: object, command: list[str] | None = None) -> dict[str, Any]:
    """Return this process's environment as JSON values.

    Args:
        seed: The run's seed.
        command: The command line; this process's own by default.
    """
    import torch  # takes seconds; reading a saved environment does not need it

    return {
        "refusion_lit": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "seed": seed,
        "command": ["refusion-lit", *sys.argv[1:]] if command is None else command,
        "num_concurrent": int(os.environ.get(NUM_CONCURRENT, 1)),
        "git": _git(),
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # processors of one name differ in speed
            "system": platform.system(),
            "num_cpus": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def describe_environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return an environment as short texts by name, without the entries that were not recorded."""
    hardware = environment.get("hardware") or {}
    git = environment.get("git") or {}
    devices = ", ".join(hardware.get("devices") or []) or "no GPU"
    cpus = f"{hardware.get('num_cpus')} CPUs, {hardware.get('num_threads')} threads"
    values = {
        "refusion-lit": environment.get("refusion_lit"),
        "python": environment.get("python"),
        "packages": ", ".join(f"{name} {number}" for name, number in (environment.get("packages") or {}).items()),
        "hardware": hardware and f"{devices}; {cpus}, {hardware.get('system')} {hardware.get('machine')}",
        "git": git and f"{git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}",
    }
    return {name: str(value) for name, value in values.items() if value}


def _processor() -> str | None:
    """Return the processor's model name on Linux, else ``None``."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _git() -> dict[str, Any] | None:
    """Return the commit and whether the working tree has changes; ``None`` outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
