"""How points are run: processes of this machine, or jobs of a SLURM cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refusion_lit.sweeps.files import LOCK, PROCESS, take_lock, write_json

_POLL_SECONDS = 0.1


class Launcher(ABC):
    """Runs points, each in its own process."""

    @abstractmethod
    def launch(self, folders: Sequence[Path]) -> Iterator[tuple[Path, str] | None]:
        """Run points; stop all that still run when the iteration is closed.

        Args:
            folders: The points' folders.

        Yields:
            A point's folder when it has ended, with how it ended in words (for a point that left no outcome), and
            ``None`` every now and then.
        """

    def check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse what cannot work, before anything runs.

        Raises:
            ValueError: If the launcher cannot run here.
        """


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Processes of this machine.

    Attributes:
        num_workers: Points that run at the same time; at least 1.
        grace_seconds: How long a process may take to end when it is asked to, before it is killed.
    """

    num_workers: int = 1
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers: expected at least 1, got {self.num_workers}.")

    def launch(self, folders: Sequence[Path]) -> Iterator[tuple[Path, str] | None]:
        """See :meth:`Launcher.launch`."""
        waiting = list(reversed(folders))
        running: dict[Path, subprocess.Popen[bytes]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.num_workers:
                    folder = waiting.pop()
                    running[folder] = _start(folder)
                for folder, process in list(running.items()):
                    if process.poll() is not None:
                        del running[folder]
                        yield folder, f"its process ended with exit code {process.returncode}"
                yield None
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(list(running.values()), self.grace_seconds)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a point in a process group of its own, which holds the point's lock for as long as it lives."""
    lock = take_lock(folder / LOCK)
    if lock is None:
        raise ValueError(f"{folder}: expected a point at rest, got one that another process runs; wait for it.")
    with lock:
        process = subprocess.Popen(
            [sys.executable, "-m", "refusion_lit.sweeps.worker", str(folder)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    write_json(folder / PROCESS, {"group": process.pid})
    return process


def _stop(processes: list[subprocess.Popen[bytes]], grace_seconds: float) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        until = time.monotonic() + grace_seconds
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Jobs of a SLURM cluster, through submitit (``pip install refusion-lit[sweep]``).

    The sweep's directory must be on a file system that the nodes share.

    Attributes:
        num_workers: Jobs that run at the same time, as a job array.
        minutes: Time limit of a job.
        partition: The cluster's partition.
        gpus_per_node: GPUs of a job.
        cpus_per_task: CPUs of a job.
        mem_gb: Memory of a job in GB.
        parameters: Further parameters of submitit, such as ``slurm_account``.
        cluster: ``local`` runs the same jobs as processes of this machine, for trying.
    """

    num_workers: int = 16
    minutes: int = 60
    partition: str | None = None
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem_gb: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    cluster: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        for name in ("num_workers", "minutes", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}.")

    def check(self) -> None:
        """See :meth:`Launcher.check`."""
        try:
            import submitit
        except ImportError as error:
            raise ValueError("launcher: Slurm needs submitit; do pip install 'refusion-lit[sweep]'.") from error
        if self.cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
            raise ValueError("launcher: expected a machine of a SLURM cluster, got one without srun; use Local.")

    def launch(self, folders: Sequence[Path]) -> Iterator[tuple[Path, str] | None]:
        """See :meth:`Launcher.launch`."""
        import submitit

        if not folders:
            return
        executor = submitit.AutoExecutor(folder=folders[0].parent.parent / "jobs", cluster=self.cluster)
        settings: dict[str, Any] = {"name": "refusion_lit", "timeout_min": self.minutes}
        settings |= {"gpus_per_node": self.gpus_per_node, "cpus_per_task": self.cpus_per_task}
        if self.mem_gb is not None:
            settings["mem_gb"] = self.mem_gb
        if self.cluster == "slurm":
            settings["slurm_array_parallelism"] = self.num_workers
            if self.partition is not None:
                settings["slurm_partition"] = self.partition
        executor.update_parameters(**settings, **self.parameters)
        from refusion_lit.sweeps.worker import run_point  # here, for a local point is this module run as a script

        # A local executor has no array: it is given so many jobs as may run at once.
        share = len(folders) if self.cluster == "slurm" else self.num_workers
        waiting, running = list(folders), {}
        try:
            while waiting or running:
                if waiting and (free := share - len(running)) > 0:
                    chosen, waiting = waiting[:free], waiting[free:]
                    with executor.batch():
                        jobs = [executor.submit(run_point, str(folder)) for folder in chosen]
                    running |= dict(zip(chosen, jobs, strict=True))
                for folder, job in list(running.items()):
                    if job.done():
                        del running[folder]
                        yield folder, _how(job)
                yield None
                time.sleep(_POLL_SECONDS)
        finally:
            for job in running.values():
                job.cancel(check=False)


def _how(job: Any) -> str:  # noqa: ANN401 - submitit's job
    try:
        error = job.exception()
    except Exception as unreadable:  # submitit raises many kinds where a job died without a result
        error = unreadable
    return f"its job {job.job_id} ended in state {job.state}" + (f": {error}" if error else "")
