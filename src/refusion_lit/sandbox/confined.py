"""The process inside the sandbox: drops all privileges, then runs a program and its tests.

The caller passes the source of this file to a fresh ``python -I -S -c``, so it imports the standard library only.
Arguments: file descriptor of the control socket, working directory, and JSON with the limits and isolation layers.

Protocol on the control socket, in JSON lines:

1. Worker: ``{"layers": [...]}`` after all privileges are dropped.
2. Caller: the program and its tests.
3. Worker: ``{"error": ...}`` or ``{"tests": "done"}``.
4. Caller, after ``done``: a nonce drawn at this moment. The run passes only if the worker returns the nonce, so nothing
   that the program reads, guesses, prints or returns earlier can make it pass.
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

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_WRITE_FILE = 0b0010
_READ_FILE = 0b0100
_READ_DIR = 0b1000
_EPERM = 1
_ENOSYS = 38
_NUM_OPEN_FILES = 64

# Linux x86_64 system calls that a computation does not need and that Landlock and resource limits leave allowed.
_DENIED = {
    "processes": (57, 58, 59, 322, 101, 310, 311, 272, 308, 135, 434, 438),
    "signals": (62, 200, 234, 129, 297, 424),
    "network": (41, 42, 49),
    "owners, modes, times, attributes": (90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280,
                                         188, 189, 190, 463, 197, 198, 199, 466),
    "mounts": (165, 166, 155, 161, 428, 429, 430, 432),
    "shared memory, message queues": (29, 30, 31, 64, 66, 68, 71, 240, 319),
    "io_uring, bpf, perf, keys, userfaultfd": (425, 426, 427, 321, 248, 249, 250, 298, 323),
    "priorities of other processes": (141, 142, 144, 203, 251, 314),
    "names of files in directories that Landlock closes (inotify, fanotify)": (253, 254, 255, 294, 300, 301),
}  # fmt: skip
_CLONE3 = 435
_compile, _exec = compile, exec  # a program that replaces the builtins must not replace its tests


def main() -> None:
    """Drop privileges, receive the program, run it and answer."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lines = control.makefile("rb")
    options = json.loads(sys.argv[3])
    set_limits(options["limits"])
    _send(control, layers=apply_layers(sys.argv[2], options["readable"], options["layers"]))
    job = json.loads(lines.readline())
    error = run(job["program"], job["tests"])
    if error is None:
        _send(control, tests="done")
        control.sendall(lines.readline())
    else:
        _send(control, error=error)
    os._exit(0)


def run(program: str, tests: str) -> str | None:
    """Run a program and then its tests in the same namespace; return the error or, on success, ``None``."""
    module = ModuleType("solution")
    sys.modules["solution"] = module
    sys.argv[:] = ["solution"]
    for part, source in (("program", program), ("tests", tests)):
        try:
            code = _compile(source, f"<{part}>", "exec", dont_inherit=True)  # not this file's imports
            _exec(code, module.__dict__)
        except BaseException as error:
            return f"{part}: {type(error).__name__}: {error}"[:500]
    return None


def set_limits(limits: Mapping[str, float]) -> None:
    """Set the resource limits that the kernel enforces on this process."""
    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_CPU", int(limits["cpu_seconds"])),
        ("RLIMIT_AS", int(limits["memory_mb"]) << 20),
        ("RLIMIT_FSIZE", int(limits["file_mb"]) << 20),
        ("RLIMIT_NOFILE", _NUM_OPEN_FILES),
    ):
        hard = resource.getrlimit(getattr(resource, name))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (value, value))
    # The caller kills this process at the time limit; the timer ends it if the caller has died.
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"] + 5)


def apply_layers(directory: str, readable: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Drop all privileges and apply the isolation layers; return the names of the layers that the kernel accepted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return []
    # capset with header version 3 for this process: no effective, permitted or inheritable capability.
    libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
    applied = ["landlock"] if "landlock" in layers and _apply_landlock(libc, directory, readable) else []
    return [*applied, "seccomp"] if "seccomp" in layers and _apply_seccomp(libc) else applied


def _apply_landlock(libc: Any, directory: str, readable: Iterable[str]) -> bool:  # noqa: ANN401
    """Deny access to all files except a directory (full access) and some paths (read access).

    Newer versions of Landlock also deny TCP connections, and signals and abstract sockets that leave the process. The
    header ``linux/landlock.h`` defines the numbers.
    """
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)  # flag 1 asks for the version
    if version < 3:  # earlier versions cannot deny truncation
        return False
    all_rights = (1 << (16 if version >= 5 else 15)) - 1  # version 5 adds the right to control devices
    tcp = 0b11 if version >= 4 else 0  # to bind and to connect
    scopes = 0b11 if version >= 6 else 0  # abstract sockets and signals
    size = 8 if version < 4 else 16 if version < 6 else 24  # bytes of the fields that the version knows
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, struct.pack("=QQQ", all_rights, tcp, scopes), size, 0)
    if ruleset < 0:
        return False
    for path in (directory, *readable):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        if path == directory:
            rights = all_rights
        elif path == "/dev/null":
            rights |= _WRITE_FILE
        beneath_path = 1  # the type of rules about files
        failed = libc.syscall(_LANDLOCK_ADD_RULE, ruleset, beneath_path, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
        if failed:
            return False
    applied = libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return applied


def _apply_seccomp(libc: Any) -> bool:  # noqa: ANN401
    """Deny new processes, signals, sockets and the other system calls in ``_DENIED``."""
    if os.uname().machine != "x86_64" or sys.maxsize < 1 << 32:
        return False
    # Opcodes of classic BPF: load a word, jump if equal / greater or equal / any bit set, return.
    load = 0x20
    equal = 0x15
    at_least = 0x35
    any_bit = 0x45
    answer = 0x06
    allow = 0x7FFF0000
    deny = 0x00050000 | _EPERM
    kill = 0x80000000
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, 0xC000003E),  # AUDIT_ARCH_X86_64: other architectures number their calls differently
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # the x32 calls
        (answer, 0, 0, kill),
        (equal, 0, 1, _CLONE3),  # filters cannot read its flags through a pointer; on ENOSYS libraries use clone
        (answer, 0, 0, 0x00050000 | _ENOSYS),
    ]
    first, second = 16, 24  # where the low half of an argument lies
    for number, argument, tests, hit, other in (
        (56, first, ((any_bit, 0x10000),), allow, deny),  # clone with CLONE_THREAD
        (302, first, ((equal, 0),), allow, deny),  # prlimit64 of the process itself
        (53, second, ((any_bit, 6),), deny, allow),  # socketpair of datagrams, which go to any socket of the machine
        (72, second, ((equal, 8), (equal, 10), (equal, 15)), deny, allow),  # fcntl that lets a file send signals
        (16, second, ((equal, 0x8901), (equal, 0x8902)), deny, allow),  # ioctl, the same
    ):
        program += [(equal, 0, 2 * len(tests) + 2, number), (load, 0, 0, argument)]
        for kind, value in tests:
            program += [(kind, 0, 1, value), (answer, 0, 0, hit)]
        program.append((answer, 0, 0, other))
    for number in sorted({number for numbers in _DENIED.values() for number in numbers}):
        program += [(equal, 0, 1, number), (answer, 0, 0, deny)]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    return libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0


def _send(control: socket.socket, **message: object) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
