"""Processes forked from the test's process, which start at once: a new Python takes ten seconds to import torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from refusion_lit.cli import main


def fork(work: Callable[[], int | None]) -> BaseProcess:
    """Run a function in a forked process; the function's return value is the exit code, 0 for ``None``."""

    def call() -> None:
        # The server that forks sweeps' points is a child of the test's process alone.
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        code = 1
        try:
            code = work() or 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    return process


def wait(process: BaseProcess) -> int | None:
    """Wait for a process and return its exit code, which is negative if a signal ended it."""
    process.join(300)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def start(args: list[str], log: Path, before: Callable[[], None] | None = None) -> BaseProcess:
    """Run a command of ``refusion-lit`` in a forked process, which prints to a file.

    Args:
        args: The command and its options.
        log: The file for standard output and standard error.
        before: Runs in the process before the command.
    """

    def work() -> int:
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        if before is not None:
            before()
        return main(args)

    return fork(work)


def act_at_call(owner: Any, name: str, number: int, act: Callable[..., object], *, is_after: bool = False) -> None:
    """Patch a function so that something happens once, for example that the process is killed.

    Args:
        owner: The class or module that has the function.
        name: The function's name.
        number: Number of the call at which ``act`` runs, from 1.
        act: Gets the arguments of the call.
        is_after: Run ``act`` after the call instead of before it.
    """
    function, num_calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number and not is_after:
            act(*args, **kwargs)
        output = function(*args, **kwargs)
        if num_calls == number and is_after:
            act(*args, **kwargs)
        return output

    setattr(owner, name, call)


def run_without_us(program: str, folder: Path) -> str:
    """Run a program in a process in which ``refusion_lit`` cannot be imported; return what the program prints."""
    return run_in_new_process('import sys; sys.modules["refusion_lit"] = None\n' + program, folder)


def run_in_new_process(program: str, folder: Path) -> str:
    """Run a program in a process that has imported nothing of this package; return what the program prints."""
    output = folder / "printed.txt"

    def work() -> None:
        sys.stdout = sys.stderr = output.open("w", buffering=1)
        for name in [name for name in sys.modules if name.partition(".")[0] == "refusion_lit"]:
            del sys.modules[name]
        exec(compile(program, "program", "exec", dont_inherit=True), {"__name__": "__main__"})

    assert wait(fork(work)) == 0, output.read_text()
    return output.read_text()


def drop_root_rights() -> None:
    """Give up the capabilities by which root reads and writes files whatever their permissions, for this process."""
    libc = ctypes.CDLL(None)
    # The system call's header is (version 3, this process); its sets are bits of 64 capabilities in two halves.
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for index in (0, 1):  # effective and permitted
        sets[index] &= ~0b110  # bit 1 is CAP_DAC_OVERRIDE, bit 2 is CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0
