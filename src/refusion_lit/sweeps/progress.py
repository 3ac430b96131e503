"""Progress of a sweep: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class SweepProgress:
    """Counts finished points and estimates the remaining time from the mean time per point so far.

    Args:
        total: Number of points to run.
        console: Where to write; standard error by default.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total, self._num_ended, self._num_failed = total, 0, 0
        self._start = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal and total:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> SweepProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def tick(self) -> None:
        """Refresh the remaining time."""
        if self._bar:
            failed = f", {self._num_failed} failed" if self._num_failed else ""
            self._bar.update(self._task, completed=self._num_ended, description=f"{self.time_left}{failed}")

    def ended(self, label: str, status: str, seconds: float | None, error: str | None) -> None:
        """Report the end of a point.

        Args:
            label: The point's options in short.
            status: ``finished`` or ``failed``.
            seconds: Duration, if it is known.
            error: The error of a failed point.
        """
        self._num_ended += 1
        self._num_failed += status != "finished"
        duration = "" if seconds is None else f" in {seconds:.1f} s"
        line = f"[{self._num_ended}/{self._total}] {status}{duration}: {label} ({self.time_left})"
        self._console.print(
            line if error is None else f"{line}\n{error}", markup=False, highlight=False, soft_wrap=True
        )
        self.tick()

    @property
    def time_left(self) -> str:
        """Estimated remaining time in words."""
        if not self._num_ended:
            return "time left unknown"
        elapsed = time.monotonic() - self._start
        seconds = round(elapsed / self._num_ended * (self._total - self._num_ended))
        hours, rest = divmod(seconds, 3600)
        return f"about {hours}:{rest // 60:02d}:{rest % 60:02d} left"
