"""Runs untrusted programs, each in a fresh sandboxed process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from refusion_lit.sandbox import isolation
from refusion_lit.sandbox.folder import exceeds, working_directory
from refusion_lit.sandbox.isolation import LEVELS, Isolation, Level
from refusion_lit.utils.require import require_at_least, require_choice

_MAX_LINE_BYTES = 1 << 16
_MAX_MESSAGE_LENGTH = 500
_START_TIMEOUT = 120.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of one run.

    Attributes:
        seconds: Wall-clock time from the start of the program, at least 0.05. Keep it well above ``cpu_seconds``, so
            that scores do not depend on how busy the machine is.
        cpu_seconds: Processor time, including the start of the interpreter, at least 1.
        memory_mb: Address space in MiB, at least 64.
        file_mb: Size of a file in MiB, at least 0.
        disk_mb: Size of all files of the run in MiB, at least 1.
        num_files: Number of files and directories of the run, at least 1.
        num_open_files: Number of open files, at least 16.
        num_processes: Number of processes and threads of the user, at least 1. Where the kernel does not count per
            user namespace, this includes the user's other processes.
    """

    seconds: float = 60.0
    cpu_seconds: int = 10
    memory_mb: int = 512
    file_mb: int = 16
    disk_mb: int = 64
    num_files: int = 1000
    num_open_files: int = 64
    num_processes: int = 64

    def __post_init__(self) -> None:
        minima = {"seconds": 0.05, "cpu_seconds": 1, "memory_mb": 64, "file_mb": 0, "disk_mb": 1,
                  "num_files": 1, "num_open_files": 16, "num_processes": 1}  # fmt: skip
        for name, minimum in minima.items():
            require_at_least(f"limits.{name}", getattr(self, name), minimum)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        status: ``passed``; ``failed`` (an exception or a failed assertion); ``timeout``; or ``exited`` (the process
            ended before its tests: it exited, a signal killed it, or it exceeded a limit).
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

    Each run is a fresh ``python -I -S`` in an empty temporary directory and in its own session, with a minimal
    environment, resource limits and no privileges. Its process group is killed at the end. The size and number of all
    files of a run are limited by a tmpfs where the process may mount one. Elsewhere this process measures the directory
    every 20 ms and ends a run that is over its limits. See :mod:`refusion_lit.sandbox` for what the isolation prevents
    and what it does not.

    Attributes:
        limits: Resource limits of one run.
        minimum: Minimum isolation; weaker isolation raises an error.
        layers: Isolation layers to use where the machine has them.
    """

    limits: Limits = field(default_factory=Limits)
    minimum: Level = "full"
    layers: tuple[str, ...] = ("bubblewrap", "namespaces", "tmpfs", "landlock", "seccomp")

    def __post_init__(self) -> None:
        require_choice("minimum_isolation", self.minimum, LEVELS)

    @cached_property
    def isolation(self) -> Isolation:
        """The isolation of this machine, found by starting a process.

        Raises:
            ValueError: If it is weaker than the minimum.
        """
        with working_directory() as directory:
            wrapper, name = self._wrapper(directory)
            process = _SandboxedProcess(wrapper, directory, self.limits, self.layers)
            try:
                applied = process.layers()
            finally:
                process.kill()
        found = Isolation(wrapper=wrapper, layers=(*([name] if name else []), *applied))
        if LEVELS.index(found.level) < LEVELS.index(self.minimum):
            raise ValueError(
                f"minimum_isolation: expected at least {self.minimum!r}, got {found.describe()} on this machine; "
                "install bubblewrap, use a kernel with Landlock and user namespaces, or lower minimum_isolation, "
                "which gives generated code more access."
            )
        return found

    def run(self, program: str, tests: str) -> Outcome:
        """Run a program, then its tests in the same namespace.

        Args:
            program: Python source.
            tests: Python source that raises if the program is wrong.

        Raises:
            ValueError: If the isolation is weaker than the minimum or differs from that of :attr:`isolation`.
        """
        expected = self.isolation.layers
        with working_directory() as directory:
            wrapper, name = self._wrapper(directory)
            process = _SandboxedProcess(wrapper, directory, self.limits, self.layers)
            try:
                applied = (*([name] if name else []), *process.layers())
                if applied != expected:
                    raise ValueError(
                        f"isolation: expected {expected}, got {applied}: nothing was run; run the command again."
                    )
                return process.run(program, tests)
            finally:
                process.kill()

    def _wrapper(self, directory: str) -> tuple[tuple[str, ...], str]:
        """Return the wrapper command and the name of its layer; both empty for none."""
        known = self.__dict__.get("isolation")
        for name in ("bubblewrap", "namespaces"):
            if name not in self.layers or (known is not None and name not in known.layers):
                continue
            wrapper = isolation.bubblewrap(directory) if name == "bubblewrap" else isolation.namespaces()
            if wrapper is not None and (known is not None or isolation.works(wrapper)):
                return wrapper, name
        return (), ""


class _SandboxedProcess:
    """A started process, and the caller's end of its control socket."""

    def __init__(self, wrapper: Sequence[str], directory: str, limits: Limits, layers: Sequence[str]) -> None:
        self._limits = limits
        self._directory = directory
        self._is_measured = False
        self._control, theirs = socket.socketpair()
        self._buffer = b""
        source = Path(__file__).with_name("confined.py").read_text(encoding="utf-8")
        options = {"limits": asdict(limits), "readable": isolation.readable_paths(), "layers": list(layers)}
        command = [isolation.interpreter(), "-I", "-S", "-c", source, str(theirs.fileno()), directory]
        with theirs:
            self._process = subprocess.Popen(
                [*wrapper, *command, json.dumps(options)],
                cwd=directory,
                env={"HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def layers(self) -> list[str]:
        """Return the layers that the process has applied to itself."""
        line = self._receive(time.monotonic() + _START_TIMEOUT)
        if not line:
            raise ValueError("sandbox: expected a Python process to start, got none; check that Python is readable.")
        layers = json.loads(line)["layers"]
        self._is_measured = "tmpfs" not in layers
        return layers

    def run(self, program: str, tests: str) -> Outcome:
        """Send the program and wait for its result."""
        deadline = time.monotonic() + self._limits.seconds
        try:
            self._send({"program": program, "tests": tests}, deadline)
            answer = _parse_message(self._receive(deadline))
            if answer.get("tests") != "done":
                error = answer.get("error")
                return Outcome(status="failed", message=_printable(error)) if isinstance(error, str) else _EXITED
            nonce = secrets.token_hex(16)
            self._send({"nonce": nonce}, deadline)
            returned = _parse_message(self._receive(deadline)).get("nonce")
            self._measure()
            return Outcome(status="passed") if returned == nonce else _EXITED
        except _DirectoryLimitError as error:
            return Outcome(status="exited", message=str(error))
        except TimeoutError:
            return Outcome(status="timeout", message=f"still running after {self._limits.seconds} s")
        except OSError:
            return _EXITED

    def kill(self) -> None:
        """Kill the process group; a PID namespace ends with its first process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()

    def _send(self, message: object, deadline: float) -> None:
        self._control.settimeout(_remaining(deadline))
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, deadline: float) -> bytes:
        """Return the next line; empty if the process has closed the socket."""
        while b"\n" not in self._buffer and len(self._buffer) < _MAX_LINE_BYTES:
            self._measure()
            remaining = _remaining(deadline)
            self._control.settimeout(min(remaining, _POLL_SECONDS) if self._is_measured else remaining)
            try:
                read = self._control.recv(4096)
            except TimeoutError:
                continue  # to measure again, or to raise at the deadline
            if not read:
                return b""
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _measure(self) -> None:
        """Raise an error if the files of the run are over its limits and no tmpfs enforces these."""
        limits = self._limits
        if self._is_measured and exceeds(self._directory, limits.disk_mb << 20, limits.num_files):
            raise _DirectoryLimitError(f"more than {limits.disk_mb} MiB or {limits.num_files} files")


class _DirectoryLimitError(Exception):
    """The files of a run are over its limits."""


_EXITED = Outcome(status="exited", message="the process ended before its tests had run")


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _parse_message(line: bytes) -> dict[str, object]:
    """Parse a message of the process, which is untrusted: anything but a JSON object counts as an empty message."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _printable(text: str) -> str:
    """Return the start of a message of the process, without the lone surrogates that no file or terminal can hold."""
    return text[:_MAX_MESSAGE_LENGTH].encode(errors="backslashreplace").decode()
