"""What a sweep says while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class SweepProgress:
    """Counts points, and estimates the time left from the mean time between the ends of points so far.

    Args:
        total: Points to run.
        console: Where to write; standard error by default.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total, self._ended, self._failed = total, 0, 0
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
        """Refresh the time left."""
        if self._bar:
            failed = f", {self._failed} failed" if self._failed else ""
            self._bar.update(self._task, completed=self._ended, description=f"{self.time_left}{failed}")

    def ended(self, label: str, status: str, seconds: float | None, error: str | None) -> None:
        """Tell of a point's end.

        Args:
            label: The point's options.
            status: How it ended.
            seconds: How long it took.
            error: What went wrong.
        """
        self._ended += 1
        self._failed += status != "finished"
        took = "" if seconds is None else f" in {seconds:.1f} s"
        line = f"[{self._ended}/{self._total}] {status}{took}: {label} ({self.time_left})"
        self._console.print(
            line if error is None else f"{line}\n{error}", markup=False, highlight=False, soft_wrap=True
        )
        self.tick()

    @property
    def time_left(self) -> str:
        """How long the rest takes, in words."""
        if not self._ended:
            return "time left not known yet"
        passed = time.monotonic() - self._start
        left = round(passed / self._ended * (self._total - self._ended))
        hours, rest = divmod(left, 3600)
        return f"about {hours}:{rest // 60:02d}:{rest % 60:02d} left"
