"""Which isolation this machine offers, and what it amounts to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

Level = Literal["limits", "files", "full"]
LEVELS: tuple[Level, ...] = ("limits", "files", "full")
"""From weak to strong: resource limits alone; no files of others; also no network and no processes."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Layers around a program.

    Attributes:
        wrapper: Command that the sandboxed interpreter is started through; empty for none.
        layers: Names of what holds: ``bubblewrap`` or ``namespaces`` from the wrapper, ``landlock`` and ``seccomp``
            from the process itself.
    """

    wrapper: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def level(self) -> Level:
        """What the layers amount to."""
        has = set(self.layers)
        if not has & {"landlock", "bubblewrap"}:
            return "limits"
        # The kernel does not hold the superuser to a number of processes.
        counts_processes = "seccomp" in has or os.geteuid() != 0
        is_apart = bool(has & {"namespaces", "bubblewrap", "seccomp"})
        return "full" if is_apart and counts_processes else "files"

    def describe(self) -> str:
        """Return one line for the user."""
        return f"{self.level} ({', '.join(self.layers) or 'resource limits alone'})"


def readable_paths() -> tuple[str, ...]:
    """Return what a Python interpreter reads: its own installation and the system's libraries."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null",
              "/dev/urandom")  # fmt: skip
    return (*(path for path in (sys.base_prefix,) if path != "/"), *system)


def interpreter() -> str:
    """Return the interpreter itself, behind the links of virtual environments."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def bubblewrap(directory: str) -> tuple[str, ...] | None:
    """Return the command that starts a program under bubblewrap, if it is installed."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    binds = [part for path in readable_paths() if not path.startswith("/dev") for part in ("--ro-bind-try", path, path)]
    return (
        program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--dev", "/dev",
        "--tmpfs", "/tmp", *binds, "--ro-bind", interpreter(), interpreter(), "--bind", directory, directory,
        "--chdir", directory,
    )  # fmt: skip


def namespaces() -> tuple[str, ...] | None:
    """Return the command that starts a program in namespaces of its own, if ``unshare`` is installed."""
    program = shutil.which("unshare")
    if program is None:
        return None
    return (program, "--user", "--map-root-user", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")


def works(wrapper: tuple[str, ...]) -> bool:
    """Return whether the kernel lets this user start a program so."""
    try:
        command = [*wrapper, interpreter(), "-I", "-S", "-c", ""]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
