"""Runs programs that nobody has read, one fresh process each."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from refusion_lit.sandbox import isolation
from refusion_lit.sandbox.isolation import LEVELS, Isolation, Level

_MAX_LINE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use.

    Attributes:
        seconds: Wall-clock time from the start of the program, above 0; well above ``cpu_seconds``, so that a busy
            machine scores as an idle one.
        cpu_seconds: Processor time, start of the interpreter included, at least 1.
        memory_mb: Address space in MiB, at least 64.
        file_mb: Size of a file in MiB, at least 0.
        num_open_files: Open files, at least 16.
        num_processes: Processes and threads of the user, at least 1 (of all the user's, where the kernel does not
            count a user namespace by itself).
    """

    seconds: float = 60.0
    cpu_seconds: int = 10
    memory_mb: int = 512
    file_mb: int = 16
    num_open_files: int = 64
    num_processes: int = 64

    def __post_init__(self) -> None:
        """Refuse limits under which no program could run."""
        lowest = {"seconds": 0.05, "cpu_seconds": 1, "memory_mb": 64, "file_mb": 0, "num_open_files": 16,
                  "num_processes": 1}  # fmt: skip
        for name, low in lowest.items():
            value = getattr(self, name)
            if not value >= low:
                raise ValueError(f"limits.{name}: expected a number of at least {low}, got {value!r}; raise it.")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: ``passed``; ``failed`` (an exception, a failed assertion); ``timeout``; ``exited`` (the process ended
            before its tests, by itself, by a signal or by a limit).
        message: Why, for people.
    """

    status: Literal["passed", "failed", "timeout", "exited"]
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether the tests ran to their end."""
        return self.status == "passed"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs a program with its tests, apart from everything else.

    Each run is a fresh ``python -I -S`` in an empty temporary folder, with an environment that holds nothing of the
    caller's, in a session of its own, limited, without rights, and killed as a group at the end. For what the layers
    hold off and what they do not, see :mod:`refusion_lit.sandbox`.

    Attributes:
        limits: What one run may use.
        minimum: Refuse to run with weaker isolation.
        layers: Layers to use where the machine has them; fewer for comparison and tests.
    """

    limits: Limits = field(default_factory=Limits)
    minimum: Level = "full"
    layers: tuple[str, ...] = ("bubblewrap", "namespaces", "landlock", "seccomp")

    def __post_init__(self) -> None:
        """Check the level's name."""
        if self.minimum not in LEVELS:
            raise ValueError(
                f"minimum_isolation: expected one of {', '.join(LEVELS)}, got {self.minimum!r}; choose one of them."
            )

    @cached_property
    def isolation(self) -> Isolation:
        """What this machine offers, found by starting a process with it.

        Raises:
            ValueError: If it is weaker than the minimum.
        """
        with tempfile.TemporaryDirectory() as directory:
            wrapper, name = self._wrapper(directory)
            worker = _Worker(wrapper, directory, self.limits, self.layers)
            try:
                held = worker.layers()
            finally:
                worker.kill()
        found = Isolation(wrapper=wrapper, layers=(*([name] if name else []), *held))
        if LEVELS.index(found.level) < LEVELS.index(self.minimum):
            raise ValueError(
                f"minimum_isolation: expected at least {self.minimum!r}, got {found.describe()} on this machine; "
                "install bubblewrap, use a kernel with Landlock and user namespaces, or lower minimum_isolation "
                "knowing that generated code then reaches more."
            )
        return found

    def run(self, program: str, tests: str) -> Outcome:
        """Run a program, then its tests in the same namespace.

        Args:
            program: Python source.
            tests: Python source that raises where the program is wrong.

        Raises:
            ValueError: If the isolation is weaker than the minimum, or did not take hold this time.
        """
        expected = self.isolation.layers
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            wrapper, name = self._wrapper(directory)
            worker = _Worker(wrapper, directory, self.limits, self.layers)
            try:
                held = (*([name] if name else []), *worker.layers())
                if held != expected:
                    raise ValueError(f"isolation: expected {expected}, got {held}; nothing was run. Try again.")
                return worker.run(program, tests)
            finally:
                worker.kill()

    def _wrapper(self, directory: str) -> tuple[tuple[str, ...], str]:
        """Return the command to start through, and its layer's name."""
        known = self.__dict__.get("isolation")
        for name in ("bubblewrap", "namespaces"):
            if name not in self.layers or (known is not None and name not in known.layers):
                continue
            wrapper = isolation.bubblewrap(directory) if name == "bubblewrap" else isolation.namespaces()
            if wrapper is not None and (known is not None or isolation.works(wrapper)):
                return wrapper, name
        return (), ""


class _Worker:
    """A started worker and the caller's end of its control socket."""

    def __init__(self, wrapper: Sequence[str], directory: str, limits: Limits, layers: Sequence[str]) -> None:
        self._seconds = limits.seconds
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
        """Return the layers that the process has put on itself."""
        line = self._receive(time.monotonic() + 30)
        if not line:
            raise ValueError("sandbox: expected a Python process to start, got none; is the interpreter readable?")
        return json.loads(line)["layers"]

    def run(self, program: str, tests: str) -> Outcome:
        """Send the program, wait for its end."""
        deadline = time.monotonic() + self._seconds
        try:
            self._send({"program": program, "tests": tests}, deadline)
            answer = _message(self._receive(deadline))
            if answer.get("tests") != "done":
                error = answer.get("error")
                return Outcome(status="failed", message=str(error)) if error else self._exited()
            nonce = secrets.token_hex(16)
            self._send({"nonce": nonce}, deadline)
            if _message(self._receive(deadline)).get("nonce") == nonce:
                return Outcome(status="passed")
            return self._exited()
        except TimeoutError:
            return Outcome(status="timeout", message=f"still running after {self._seconds} s")
        except OSError:
            return self._exited()

    def kill(self) -> None:
        """End the whole group; a namespace of processes ends with its first one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()

    def _exited(self) -> Outcome:
        return Outcome(status="exited", message="the process ended before its tests had run")

    def _send(self, message: object, deadline: float) -> None:
        self._control.settimeout(_left(deadline))
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer and len(self._buffer) < _MAX_LINE:
            self._control.settimeout(_left(deadline))
            read = self._control.recv(4096)
            if not read:
                return b""
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _message(line: bytes) -> dict[str, object]:
    """Read what the process says, which may be anything."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
