"""Runs every untrusted program in a fresh sandboxed process.

``docs/benchmarks.md`` lists what the levels of isolation prevent; ``full`` also protects owners, modes and times of
files. A run passes only if the process returns a nonce drawn after the tests have finished. Nothing that the program
reads, prints or returns earlier can help.

The sandbox does not prevent:

- wrong passes: program and tests share an interpreter, so code that targets this package can return objects that
  compare equal to everything, or forge a message on the control socket. It passes, but gains no access;
- discovery of the existence, sizes and times of outside files, and of the targets of symbolic links;
- at level ``limits``: processes that a program starts and detaches, which outlive its time limit;
- many files that fill the disk until the time limit; the directory is deleted at the end;
- kernel exploits.

Use a virtual machine for code from an attacker.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from refusion_lit.utils.require import check_options, require, require_choice

Level = Literal["limits", "full"]
LEVELS: tuple[Level, ...] = ("limits", "full")
"""``limits``: resource limits only; ``full``: also no access to outside files, no network and no processes."""
LAYERS = ("landlock", "seccomp")
"""What the kernel enforces besides the limits: Landlock restricts files, seccomp other system calls."""

_READABLE = (*{sys.base_prefix} - {"/"}, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache",
             "/usr/share/zoneinfo", "/dev/null", "/dev/urandom")  # fmt: skip
_MAX_LINE_BYTES = 1 << 16
_MAX_MESSAGE_LENGTH = 500
_START_TIMEOUT = 120.0
_LEAST_TIMEOUT = 1e-6  # a socket with timeout 0 does not wait


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Resource limits of a run.

    Attributes:
        seconds: Wall-clock time from the program's start, at least 0.05. Keep it well above ``cpu_seconds``, so that
            scores do not depend on the machine's load.
        cpu_seconds: Processor time, including the interpreter's start, at least 1.
        memory_mb: Address space in MiB, at least 64.
        file_mb: Maximum file size in MiB, at least 0.
    """

    ranges = {"seconds": 0.05, "cpu_seconds": 1, "memory_mb": 64, "file_mb": 0}
    seconds: float = 60.0
    cpu_seconds: int = 10
    memory_mb: int = 512
    file_mb: int = 16

    def __post_init__(self) -> None:
        check_options(self, "limits.")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        status: ``passed``; ``failed`` (an exception or a failed assertion); ``timeout``; or ``exited`` (the process
            ended before the tests: it exited, a signal killed it, or it exceeded a limit).
        message: The reason, for users.
    """

    status: Literal["passed", "failed", "timeout", "exited"]
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return self.status == "passed"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs programs with their tests in isolation.

    A run is a fresh ``python -I -S`` in an empty temporary directory and a new session, with a minimal environment,
    resource limits and no privileges. Its process group is killed at the end. The module's docstring lists what the
    isolation does not prevent.

    Attributes:
        limits: Resource limits of a run.
        minimum: Minimum isolation; weaker isolation raises an error.
        layers: Isolation layers to use if the kernel has them.
    """

    limits: ResourceLimits = field(default_factory=ResourceLimits)
    minimum: Level = "full"
    layers: tuple[str, ...] = LAYERS

    def __post_init__(self) -> None:
        require_choice("minimum_isolation", self.minimum, LEVELS)

    @cached_property
    def applied(self) -> tuple[str, ...]:
        """The layers that this machine's kernel applies; the first access starts a process to find out.

        Raises:
            ValueError: If the isolation is weaker than the minimum.
        """
        with contextlib.closing(_SandboxedProcess(self.limits, self.layers)) as process:
            applied = process.applied_layers()
        is_enough = self.minimum == "limits" or applied == LAYERS
        fix = "use Linux 6.2 or newer on x86-64, or lower minimum_isolation, which gives generated code more access"
        require(is_enough, "minimum_isolation", f"at least {self.minimum!r}", _description(applied), fix)
        return applied

    def describe(self) -> str:
        """Return a one-line description of this machine's isolation."""
        return _description(self.applied)

    def run(self, program: str, tests: str) -> Outcome:
        """Run a program, then its tests in the same namespace.

        Args:
            program: Python source.
            tests: Python source that raises if the program is wrong.

        Raises:
            ValueError: If the isolation is weaker than the minimum, or differs from :attr:`applied`.
        """
        expected = self.applied
        with contextlib.closing(_SandboxedProcess(self.limits, self.layers)) as process:
            applied = process.applied_layers()
            require(applied == expected, "isolation", str(expected), applied, "nothing was run; run the command again")
            return process.run(program, tests)


def _description(layers: Sequence[str]) -> str:
    level = "full" if tuple(layers) == LAYERS else "limits"
    return f"{level} ({', '.join(layers) or 'resource limits only'})"


class _SandboxedProcess:
    """A process in an empty directory, with the caller's end of the control socket."""

    def __init__(self, limits: ResourceLimits, layers: Sequence[str]) -> None:
        self._limits = limits
        self._directory = tempfile.mkdtemp(prefix="refusion-lit-")
        self._control, worker_socket = socket.socketpair()
        self._buffer = b""
        # The base interpreter: a virtual environment lies outside the readable directories.
        interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        source = Path(__file__).with_name("confined.py").read_text(encoding="utf-8")
        options = {"limits": asdict(limits), "readable": _READABLE, "layers": list(layers)}
        descriptor = worker_socket.fileno()
        with worker_socket:
            self._process = subprocess.Popen(
                [
                    interpreter,
                    "-I",
                    "-S",
                    "-c",
                    source,
                    str(descriptor),
                    self._directory,
                    json.dumps(options),
                ],
                cwd=self._directory,
                env={"HOME": self._directory, "TMPDIR": self._directory, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )

    def applied_layers(self) -> tuple[str, ...]:
        """Return the layers that the process reports as applied."""
        line = self._receive(time.monotonic() + _START_TIMEOUT)
        if not line:
            raise ValueError("sandbox: expected a Python process to start, got none; check that Python is readable.")
        return tuple(json.loads(line)["layers"])

    def run(self, program: str, tests: str) -> Outcome:
        """Send the program and wait for its result."""
        deadline = time.monotonic() + self._limits.seconds
        exited = Outcome(status="exited", message="the process ended before its tests had run")
        try:
            self._send({"program": program, "tests": tests}, deadline)
            answer = _parse_message(self._receive(deadline))
            if answer.get("tests") != "done":
                error = answer.get("error")
                return Outcome(status="failed", message=_printable(error)) if isinstance(error, str) else exited
            nonce = secrets.token_hex(16)
            self._send({"nonce": nonce}, deadline)
            returned = _parse_message(self._receive(deadline)).get("nonce")
            return Outcome(status="passed") if returned == nonce else exited
        except TimeoutError:
            return Outcome(status="timeout", message=f"still running after {self._limits.seconds} s")
        except OSError:
            return exited

    def close(self) -> None:
        """Kill the process group and delete the directory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()
        # Shell commands delete trees of any depth, and directories without permissions.
        delete = 'chmod -R u+rwX "$0"; rm -rf "$0"'
        subprocess.run(["sh", "-c", delete, self._directory], stderr=subprocess.DEVNULL, check=False)

    def _send(self, message: object, deadline: float) -> None:
        self._control.settimeout(max(deadline - time.monotonic(), _LEAST_TIMEOUT))
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, deadline: float) -> bytes:
        """Return the next line, or nothing if the process has closed the socket."""
        while b"\n" not in self._buffer and len(self._buffer) < _MAX_LINE_BYTES:
            self._control.settimeout(max(deadline - time.monotonic(), _LEAST_TIMEOUT))
            read = self._control.recv(4096)
            if not read:
                return b""
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _parse_message(line: bytes) -> dict[str, object]:
    """Parse an untrusted message of the process; anything but a JSON object counts as an empty message."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _printable(text: str) -> str:
    """Shorten a message of the process, and escape lone surrogates, which files and terminals cannot hold."""
    return text[:_MAX_MESSAGE_LENGTH].encode(errors="backslashreplace").decode()
