"""The isolation layers of this machine, and the level that they reach."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

Level = Literal["limits", "files", "full"]
LEVELS: tuple[Level, ...] = ("limits", "files", "full")
"""From weak to strong: resource limits only; no access to outside files; also no network and no processes."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The isolation of a sandboxed process.

    Attributes:
        wrapper: Command through which the interpreter is started; empty for none.
        layers: Names of the active layers: ``bubblewrap`` or ``namespaces`` from the wrapper; ``tmpfs`` (a file
            system of limited size for the program's files), ``landlock`` and ``seccomp`` from the process itself.
    """

    wrapper: tuple[str, ...]
    layers: tuple[str, ...]

    @property
    def level(self) -> Level:
        """The level that the layers reach."""
        active = set(self.layers)
        if not active & {"landlock", "bubblewrap"}:
            return "limits"
        # The kernel does not enforce the limit on the number of processes for root.
        limits_processes = "seccomp" in active or os.geteuid() != 0
        is_separated = bool(active & {"namespaces", "bubblewrap", "seccomp"})
        return "full" if is_separated and limits_processes else "files"

    def describe(self) -> str:
        """Return level and layers in one line."""
        return f"{self.level} ({', '.join(self.layers) or 'resource limits only'})"


def readable_paths() -> tuple[str, ...]:
    """Return the paths that a Python interpreter reads: its installation and the system's libraries."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null",
              "/dev/urandom")  # fmt: skip
    return (*(path for path in (sys.base_prefix,) if path != "/"), *system)


def interpreter() -> str:
    """Return the path of the Python binary, with the links of a virtual environment resolved."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def bubblewrap(directory: str) -> tuple[str, ...] | None:
    """Return the command that starts a program in bubblewrap; ``None`` if it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    # The process mounts a tmpfs and drops the capability before it runs a program. A setuid bwrap refuses to add any.
    capability = () if os.stat(program).st_mode & stat.S_ISUID else ("--cap-add", "CAP_SYS_ADMIN")
    binds = [part for path in readable_paths() if not path.startswith("/dev") for part in ("--ro-bind-try", path, path)]
    return (
        program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *capability,
        "--dev", "/dev", "--tmpfs", "/tmp", *binds, "--ro-bind", interpreter(), interpreter(),
        "--bind", directory, directory, "--chdir", directory,
    )  # fmt: skip


def namespaces() -> tuple[str, ...] | None:
    """Return the command that starts a program in new namespaces; ``None`` if ``unshare`` is not installed."""
    program = shutil.which("unshare")
    if program is None:
        return None
    return (program, "--user", "--map-root-user", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")


def works(wrapper: tuple[str, ...]) -> bool:
    """Return whether this user can start a program through a wrapper."""
    try:
        command = [*wrapper, interpreter(), "-I", "-S", "-c", ""]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
