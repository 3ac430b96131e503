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

from refusion_lit.version import __version__

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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return commit and whether the working tree differs from it; ``None`` outside a repository."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
