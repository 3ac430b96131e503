"""What a result depends on besides its config: versions, seed, git state, hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from refusion_lit.version import __version__

_LONGEST, _SHOWN = 2000, 100
"""Characters of a text in a kept config: a stored tokenizer's files have millions."""
_PACKAGES = ("torch", "lightning", "torchmetrics", "transformers", "tokenizers", "jsonargparse", "numpy")


def environment(seed: object, command: list[str]) -> dict[str, Any]:
    """Describe this process.

    Args:
        seed: The run's seed.
        command: The command's arguments.
    """
    return {
        "refusion_lit": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "seed": seed,
        "command": command,
        "git": _git(),
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "system": platform.system(),
            "num_cpus": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def write_environment(directory: Path, seed: object) -> None:
    """Write ``environment.json`` into a run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    values = environment(seed, ["refusion-lit", *sys.argv[1:]])
    (directory / "environment.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def environment_of(directory: Path, seed: object) -> dict[str, Any]:
    """Return what a run's directory says of its environment, or this process's where it says nothing."""
    path = directory / "environment.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    return environment(seed, ["refusion-lit", *sys.argv[1:]])


def config_of(directory: Path) -> dict[str, Any] | None:
    """Return the resolved config in a run's directory, without texts too long to read; ``None`` if there is none."""
    path = directory / "config.yaml"
    if not path.is_file():
        return None
    return _shortened(yaml.safe_load(path.read_text(encoding="utf-8")))


def _shortened(value: Any) -> Any:  # noqa: ANN401 - YAML
    if isinstance(value, dict):
        return {name: _shortened(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[:_SHOWN]} ... ({len(value)} characters)"
    return value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str | None:
    """Return the processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _git() -> dict[str, Any] | None:
    """Return commit and whether the working tree differs from it; ``None`` outside a repository."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
