"""The environment of a run: versions, command, seed, git state and hardware, kept as ``environment.json``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from refusion_lit.version import __version__

FILE_NAME = "environment.json"
_PACKAGES = ("torch", "lightning", "torchmetrics", "transformers", "tokenizers", "jsonargparse", "numpy")


def environment(seed: object, command: list[str] | None = None) -> dict[str, Any]:
    """Return the environment of this process as JSON values.

    Args:
        seed: The run's seed.
        command: The command line; this process's own by default.
    """
    import torch  # takes seconds; reading a saved environment does not need it

    return {
        "refusion_lit": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "seed": seed,
        "command": ["refusion-lit", *sys.argv[1:]] if command is None else command,
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


def described_environment(environment: Mapping[str, Any]) -> dict[str, str]:
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str | None:
    """Return the processor's model name on Linux, ``None`` where ``/proc/cpuinfo`` has none."""
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
