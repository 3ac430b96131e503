"""Memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

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
