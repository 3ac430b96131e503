"""Launchers run the points of a sweep: as processes of this machine or as jobs of a SLURM cluster.

Each process runs the subcommands of one point in order, and writes its outcome as the last step.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refusion_lit.utils.files import acquire_lock, read_object, write_json_atomically
from refusion_lit.utils.require import require_at_least

OUTCOME = "outcome.json"
POINT = "point.json"
LOG = "log.txt"
LOCK = "lock"

_PROGRAM = "import sys; from refusion_lit.sweeps.launchers import run_point; sys.exit(not run_point(sys.argv[1]))"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL when a running point is stopped."""

# Set by the launcher of an outer run; a point's own run must not inherit them, nor that its job is one task.
_OUTER_RUN = ("REFUSION_LIT_RUN_VERSION", "LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "SLURM_NTASKS")


class Launcher(ABC):
    """Runs points, each in its own process."""

    @abstractmethod
    def launch(self, folders: Sequence[Path]) -> Generator[tuple[Path, str]]:
        """Run points; closing the generator stops all points that are still running.

        Args:
            folders: Directories of the points.

        Yields:
            The directory of each point that has ended, and how its process or job ended, in words.
        """

    def check(self) -> None:  # noqa: B027 - optional
        """Check that the launcher works on this machine, before anything runs.

        Raises:
            ValueError: If it does not.
        """


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Runs points as processes of this machine.

    Attributes:
        num_workers: Number of points that run concurrently; at least 1.
    """

    num_workers: int = 1

    def __post_init__(self) -> None:
        require_at_least("num_workers", self.num_workers, 1)

    def launch(self, folders: Sequence[Path]) -> Generator[tuple[Path, str]]:
        """See :meth:`Launcher.launch`."""
        waiting = list(reversed(folders))
        running: dict[Path, subprocess.Popen[bytes]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.num_workers:
                    folder = waiting.pop()
                    program = [sys.executable, "-c", _PROGRAM, str(folder)]  # in a process group of its own
                    running[folder] = subprocess.Popen(program, stdin=subprocess.DEVNULL, start_new_session=True)
                for folder, process in list(running.items()):
                    if process.poll() is not None:
                        _signal(process, signal.SIGKILL)  # what it started may have outlived it
                        del running[folder]
                        yield folder, f"its process ended with exit code {process.returncode}"
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(list(running.values()))


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            _signal(process, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Runs points as one job array of a SLURM cluster, through submitit (``pip install submitit``).

    The sweep's directory must be on a file system that all nodes share.

    Attributes:
        num_workers: Maximum number of jobs that run concurrently.
        minutes: Time limit of a job.
        parameters: Further submitit parameters of a job, such as ``gpus_per_node``, ``cpus_per_task``, ``mem_gb``,
            ``slurm_partition`` and ``slurm_account``; the cluster's defaults without them.
        cluster: ``slurm``, or ``local`` to try the same jobs as processes of this machine, all at once.
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

    def launch(self, folders: Sequence[Path]) -> Generator[tuple[Path, str]]:
        """See :meth:`Launcher.launch`."""
        if not folders:
            return
        import submitit

        executor = submitit.AutoExecutor(folder=folders[0].parent.parent / "jobs", cluster=self.cluster)
        own = {"name": "refusion_lit", "timeout_min": self.minutes, "slurm_array_parallelism": self.num_workers}
        executor.update_parameters(**own, **self.parameters)
        running = dict(zip(folders, executor.map_array(run_point, map(str, folders)), strict=True))
        try:
            while running:
                for folder, job in list(running.items()):
                    if job.done():
                        del running[folder]
                        yield folder, _describe_end(job)
                time.sleep(_POLL_SECONDS)
        finally:
            for job in running.values():
                job.cancel(check=False)


def _describe_end(job: Any) -> str:  # noqa: ANN401 - a job of submitit
    try:
        error = job.exception()
    except Exception as unreadable:  # submitit raises many types for a job that died without a result
        error = unreadable
    return f"its job {job.job_id} ended in state {job.state}" + (f": {error}" if error else "")


def run_point(folder: str) -> bool:
    """Run a point and write ``outcome.json`` as the last step; the point's lock is held meanwhile.

    Args:
        folder: Directory of the point, with its ``point.json``.

    Returns:
        Whether the point finished.

    Raises:
        ValueError: If another process runs the point.
    """
    place = Path(folder)
    lock = acquire_lock(place / LOCK, folder, "other process of this point", "wait until it ends, or end it")
    point = read_object(place / POINT)
    for subcommand in point["commands"]:
        shutil.rmtree(place / subcommand, ignore_errors=True)
    start = time.monotonic()
    error = _run_commands(place, point["commands"])
    if error is None and not (place / "test" / "results.json").is_file():
        error = "test wrote no results.json"
    status = "finished" if error is None else "failed"
    write_json_atomically(place / OUTCOME, {"status": status, "seconds": time.monotonic() - start, "error": error})
    lock.release()
    return error is None


def _run_commands(place: Path, commands: dict[str, list[str]]) -> str | None:
    """Run the point's subcommands until one fails; return its error."""
    environment = {name: value for name, value in os.environ.items() if name not in _OUTER_RUN}
    with (place / LOG).open("wb") as log:
        for subcommand, command in commands.items():
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
            )
            if done.returncode:
                return f"{subcommand} ended with exit code {done.returncode}:\n{tail(place / LOG)}"
    return None


def tail(path: Path) -> str:
    """Return the last 2000 characters of a text file; none if there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""
