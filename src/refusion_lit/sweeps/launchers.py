"""Launchers run a sweep's points: as local processes, or as jobs on a SLURM cluster.

A point's process runs the point's subcommands in order and writes ``outcome.json`` last. On Linux, local processes are
forks of a process that has imported the libraries, because importing takes seconds.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from refusion_lit.reports.results import NUM_CONCURRENT
from refusion_lit.utils.files import acquire_lock, read_object, write_json_atomically
from refusion_lit.utils.require import require_at_least

OUTCOME = "outcome.json"
POINT = "point.json"
LOG = "log.txt"
LOCK = "lock"

_CAN_FORK = sys.platform == "linux"
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL when a running point is stopped."""

# The launcher of an outer run sets these variables. A point with them would act as a part of that run.
_OUTER_RUN = ("REFUSION_LIT_RUN_VERSION", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "SLURM_NTASKS")


class Launcher(ABC):
    """Runs points in separate processes."""

    @abstractmethod
    def launch(self, folders: Sequence[Path]) -> Generator[dict[Path, str]]:
        """Run the points in some directories; closing the generator stops all running points.

        Yields:
            Several times a second, the directories of newly ended points, with the way they ended in words.
        """

    def check(self) -> None:  # noqa: B027 - optional
        """Raise ValueError if the launcher does not work on this machine."""

    def preload(self, module: str) -> None:  # noqa: B027 - optional
        """Begin to import a module that all points need; return at once."""


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Runs points as processes on this machine.

    Attributes:
        num_workers: Number of points that run concurrently, at least 1. Concurrent points slow down one another, so
            tables leave out their speeds.
    """

    num_workers: int = 1

    def __post_init__(self) -> None:
        require_at_least("num_workers", self.num_workers, 1)

    def preload(self, module: str) -> None:
        """Import a module in the process that points are forked from."""
        if _CAN_FORK:
            forkserver.set_forkserver_preload([module])
            with _apart():
                forkserver.ensure_running()

    def launch(self, folders: Sequence[Path]) -> Generator[dict[Path, str]]:
        """See :meth:`Launcher.launch`."""
        num_concurrent = min(self.num_workers, len(folders))
        waiting = list(reversed(folders))
        running: dict[Path, BaseProcess] = {}
        context: Any = multiprocessing.get_context("forkserver" if _CAN_FORK else "spawn")
        try:
            while waiting or running:
                while waiting and len(running) < num_concurrent:
                    folder = waiting.pop()
                    arguments = (str(folder), num_concurrent, os.getcwd(), dict(os.environ))
                    process = context.Process(target=_run_in_session, args=arguments)
                    with _apart():
                        process.start()
                    running[folder] = process
                ended = [folder for folder, process in running.items() if process.exitcode is not None]
                for folder in ended:
                    _signal_group(running[folder], signal.SIGKILL)  # subprocesses may outlive the point
                yield {folder: f"its process ended with exit code {running.pop(folder).exitcode}" for folder in ended}
                time.sleep(_POLL_SECONDS)
        finally:
            for signal_number in (signal.SIGTERM, signal.SIGKILL):
                for process in running.values():
                    _signal_group(process, signal_number)
                deadline = time.monotonic() + _GRACE_SECONDS
                for process in running.values():
                    process.join(timeout=max(0.0, deadline - time.monotonic()))


@contextmanager
def _apart() -> Generator[None]:
    """Start processes in this context that neither get this process's Ctrl-C nor run its main module.

    The main module may be a script that runs a sweep. The process that points are forked from ignores Ctrl-C only after
    its imports, so it begins with the signal blocked; a point unblocks the signal.
    """
    resource_tracker.ensure_running()  # which unblocks the signal
    main = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_in_session(folder: str, num_concurrent: int, directory: str, environment: Mapping[str, str]) -> None:
    """Run a point in a session: its process group can be stopped with everything that the point starts."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.chdir(directory)  # the parent process may have another directory and environment
    _set_environment(environment)
    sys.exit(not run_point(folder, num_concurrent))


def _signal_group(process: BaseProcess, signal_number: int) -> None:
    """Send a signal to a point's process and all its subprocesses; do nothing if they have ended."""
    assert process.pid is not None  # the process has been started
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            if process.is_alive():  # and has not made its session yet
                os.kill(process.pid, signal_number)


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Runs points as a job array on a SLURM cluster, through submitit (``pip install submitit``).

    The sweep's directory must be on a file system that all nodes share.

    Attributes:
        num_workers: Maximum number of jobs that run concurrently.
        minutes: Time limit per job.
        parameters: Further submitit parameters, for example ``gpus_per_node``, ``cpus_per_task``, ``mem_gb``,
            ``slurm_partition`` and ``slurm_account``; the cluster's defaults without them.
        cluster: ``slurm``, or ``local`` to try the same jobs as local processes, all at once.
    """

    num_workers: int = 16
    minutes: int = 60
    parameters: dict[str, Any] = field(default_factory=dict)
    cluster: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        for name in ("num_workers", "minutes"):
            require_at_least(name, getattr(self, name), 1)

    def check(self) -> None:
        """See :meth:`Launcher.check`."""
        try:
            import submitit
        except ImportError as error:
            raise ValueError("launcher: Slurm needs submitit; run pip install submitit.") from error
        if self.cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
            raise ValueError("launcher: expected a machine of a SLURM cluster, got one without srun; use Local.")

    def launch(self, folders: Sequence[Path]) -> Generator[dict[Path, str]]:
        """See :meth:`Launcher.launch`."""
        if not folders:
            return
        import submitit

        executor = submitit.AutoExecutor(folder=folders[0].parent.parent / "jobs", cluster=self.cluster)
        options = {"name": "refusion_lit", "timeout_min": self.minutes, "slurm_array_parallelism": self.num_workers}
        executor.update_parameters(**options, **self.parameters)
        num_concurrent = len(folders) if self.cluster == "local" else 1  # a job of SLURM has its own processors
        jobs = executor.map_array(run_point, map(str, folders), [num_concurrent] * len(folders))
        running = dict(zip(folders, jobs, strict=True))
        try:
            while running:
                ended = [folder for folder, job in running.items() if job.done()]
                yield {folder: _describe_end(running.pop(folder)) for folder in ended}
                time.sleep(_POLL_SECONDS)
        finally:
            for job in running.values():
                job.cancel(check=False)


def _describe_end(job: Any) -> str:  # noqa: ANN401 - a job of submitit
    """Return in words how a job ended."""
    try:
        error = job.exception()
    except Exception as exception:  # submitit raises many types for a job that died without a result
        error = exception
    return f"its job {job.job_id} ended in state {job.state}" + (f": {error}" if error else "")


def run_point(folder: str, num_concurrent: int = 1) -> bool:
    """Run a point and write ``outcome.json``; hold the point's lock meanwhile.

    Args:
        folder: The point's directory, with its ``point.json``.
        num_concurrent: Number of points that share the machine.

    Returns:
        Whether the point finished.

    Raises:
        ValueError: If another process runs the point.
    """
    directory = Path(folder)
    lock = acquire_lock(directory / LOCK, folder, "other process of this point", "wait until it ends, or end it")
    environment = {name: value for name, value in os.environ.items() if name not in _OUTER_RUN}
    environment[NUM_CONCURRENT] = str(num_concurrent)
    # A fork of a SLURM job's process would inherit submitit's handlers of signals.
    is_forked = _CAN_FORK and multiprocessing.parent_process() is not None
    context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
    start = time.monotonic()
    error = None
    (directory / LOG).write_bytes(b"")
    for subcommand, arguments in read_object(directory / POINT)["commands"].items():
        shutil.rmtree(directory / subcommand, ignore_errors=True)
        process = context.Process(target=_run_module, args=(arguments, str(directory / LOG), environment))
        process.start()
        process.join()
        if process.exitcode:
            error = f"{subcommand} ended with exit code {process.exitcode}:\n{tail(directory / LOG)}"
            break
    if error is None and not (directory / "test" / "results.json").is_file():
        error = "test wrote no results.json"
    status = "finished" if error is None else "failed"
    write_json_atomically(directory / OUTCOME, {"status": status, "seconds": time.monotonic() - start, "error": error})
    lock.release()
    return error is None


def _run_module(arguments: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    """Run a module as ``python -m ARGUMENTS`` does, in this process, and append its output to a log."""
    for path, flags, descriptors in ((os.devnull, os.O_RDONLY, [0]), (log, os.O_WRONLY | os.O_APPEND, [1, 2])):
        opened = os.open(path, flags)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
    _set_environment(environment)
    sys.argv = list(arguments)
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # a logger may upload its last lines there; multiprocessing calls it from 3.13 on


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def tail(path: Path) -> str:
    """Return a file's last 2000 characters; an empty text if the file is missing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""
