"""What runs inside the sandbox: gives up its rights, then runs a program and its tests.

The source of this file is handed to a fresh ``python -I -S -c``; it therefore imports the standard library alone.
Arguments: number of the control socket, working directory, JSON with limits and layers.

On the control socket go JSON lines. Worker: ``{"layers": [...]}`` once nothing more is to be given up. Caller: the
program and its tests. Worker: ``{"error": ...}``, or ``{"tests": "done"}``. Only then does the caller draw a nonce and
send it, and only a worker that returns it has passed: nothing that the program could read beforehand, guess, print or
exit with makes it pass.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

_NO_NEW_PRIVILEGES, _SET_SECCOMP = 38, 22
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ = 0b1100  # read a file, list a directory
_EPERM, _ENOSYS = 1, 38

# Linux on x86_64: what a program that only computes never needs, and what Landlock and limits leave open.
_DENIED = {
    "processes": (57, 58, 59, 322, 101, 310, 311, 272, 308, 135, 434, 438),
    "signals": (62, 200, 234, 129, 297, 424),
    "network": (41, 42, 49),
    "owners, modes, times, attributes": (90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280,
                                         188, 189, 190, 463, 197, 198, 199, 466),
    "mounts": (165, 166, 155, 161, 428, 429, 430, 432),
    "shared memory, queues": (29, 30, 31, 64, 66, 68, 71, 240, 319),
    "kernel": (425, 426, 427, 321, 248, 249, 250, 298, 323),
    "others' priorities": (141, 142, 144, 203, 251, 314),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT = 56, 435, 302


def main() -> None:
    """Give up rights, receive the program, run it, answer."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("rb")
    options = json.loads(sys.argv[3])
    limit(options["limits"])
    _say(control, layers=confine(sys.argv[2], options["readable"], options["layers"]))
    job = json.loads(lines.readline())
    error = run(job["program"], job["tests"])
    if error is None:
        _say(control, tests="done")
        control.sendall(lines.readline())
    else:
        _say(control, error=error)
    os._exit(0)


def run(program: str, tests: str) -> str | None:
    """Run a program and, in its namespace, its tests; return why they failed, or nothing."""
    module = ModuleType("solution")
    sys.modules["solution"] = module
    sys.argv[:] = ["solution"]
    for part, source in (("program", program), ("tests", tests)):
        try:
            exec(compile(source, f"<{part}>", "exec"), module.__dict__)
        except BaseException as error:
            return f"{part}: {type(error).__name__}: {error}"[:500]
    return None


def limit(limits: Mapping[str, float]) -> None:
    """Set what the kernel enforces on this process."""
    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_CPU", int(limits["cpu_seconds"])),
        ("RLIMIT_AS", int(limits["memory_mb"]) << 20),
        ("RLIMIT_FSIZE", int(limits["file_mb"]) << 20),
        ("RLIMIT_NOFILE", int(limits["num_open_files"])),
        ("RLIMIT_NPROC", int(limits["num_processes"])),
    ):
        hard = resource.getrlimit(getattr(resource, name))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (value, value))
    # The caller kills at the limit; this is for the case that the caller has died.
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"] + 5)


def confine(directory: str, readable: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Apply layers of isolation, in this order, and return those that took hold."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return []
    # Version 3 of the header, this process; no effective, permitted or inheritable capability.
    libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
    held = []
    if "landlock" in layers and _landlock(libc, directory, readable):
        held.append("landlock")
    if "seccomp" in layers and _seccomp(libc):
        held.append("seccomp")
    return held


def _landlock(libc: Any, directory: str, readable: Iterable[str]) -> bool:  # noqa: ANN401
    """Forbid all files but a directory (everything) and some paths (reading)."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 3:  # older ones cannot forbid truncating
        return False
    everything = (1 << (16 if version >= 5 else 15)) - 1
    tcp, scopes = (0b11 if version >= 4 else 0), (0b11 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(_LANDLOCK_CREATE, struct.pack("=QQQ", everything, tcp, scopes), size, 0)
    if rules < 0:
        return False
    for path in (directory, *readable):
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = everything if path == directory else _READ if os.path.isdir(path) else _READ & 0b0100
        if path == "/dev/null":
            allowed |= 0b0010
        added = libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, handle), 0)
        os.close(handle)
        if added != 0:
            return False
    done = libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


def _seccomp(libc: Any) -> bool:  # noqa: ANN401
    """Forbid new processes, signals, sockets and whatever else a computation has no use for."""
    if os.uname().machine != "x86_64" or sys.maxsize < 1 << 32:
        return False
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, 0xC000003E),  # another architecture's calls have other numbers
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # so do those of x32
        (answer, 0, 0, kill),
        (equal, 0, 1, _CLONE3),  # its flags cannot be read here: libraries fall back to clone
        (answer, 0, 0, 0x00050000 | _ENOSYS),
        (equal, 0, 4, _CLONE),
        (load, 0, 0, 16),
        (any_bit, 0, 1, 0x10000),  # a thread
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
        (equal, 0, 4, _PRLIMIT),
        (load, 0, 0, 16),
        (equal, 0, 1, 0),  # its own limits
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    for number in sorted({number for numbers in _DENIED.values() for number in numbers}):
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    return libc.prctl(_SET_SECCOMP, 2, header, 0, 0) == 0


def _say(control: socket.socket, **message: object) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
