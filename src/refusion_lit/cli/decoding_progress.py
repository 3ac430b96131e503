"""Progress bars of decoding: finished answers, tokens per second and time left, with a bar for each decoder."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn

from refusion_lit.decoding import Generation, GenerationCallback, RowState


class DecodingProgress(Progress):
    """Shows bars on an interactive terminal until it is stopped, and nothing elsewhere.

    Args:
        console: Where to show the bars; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(),
        )
        # Estimate speed and time left from the last 1 000 updates, the most that rich keeps, not from the last 30
        # seconds.
        options = {"transient": True, "disable": not console.is_interactive, "speed_estimate_period": float("inf")}
        super().__init__(*columns, console=console, **options)

    def add_bar(self, name: str, total: float, completed: int = 0, **fields: Any) -> Task:  # noqa: ANN401 - as rich takes them
        """Add a bar. Further values go to rich's task; an infinite total is shown as unknown."""
        self.start()
        self.add_task(name, total=total if math.isfinite(total) else None, completed=completed, text="", **fields)
        return self.tasks[-1]

    def watch(self, name: str, total: int, finished: int = 0) -> GenerationCallback:
        """Return a callback for one call of ``decode``.

        Args:
            name: Name of the decoder; calls with the same name share a bar.
            total: Number of all answers.
            finished: Number of answers from an interrupted run.
        """
        bars = (bar for bar in self.tasks if bar.description == name and "num_tokens" in bar.fields)
        return _Answers(self, next(bars, None) or self.add_bar(name, total, finished, num_tokens=0, seconds=0.0))


class _Answers(GenerationCallback):
    """Moves a bar with the answers of one call of ``decode``, and shows the tokens per second of all calls."""

    def __init__(self, bars: Progress, bar: Task) -> None:
        self._bars, self._bar = bars, bar
        self._counted: dict[int, int] = {}
        self._num_tokens = bar.fields["num_tokens"]
        self._start = time.monotonic() - bar.fields["seconds"]

    def on_commit(self, index: int, state: RowState) -> None:
        self._count(index, state.num_committed)

    def on_finished(self, index: int, generation: Generation) -> None:
        self._bars.advance(self._bar.id)
        self._count(index, generation.num_tokens)  # tokens committed after EOS no longer count

    def _count(self, index: int, num_tokens: int) -> None:
        self._num_tokens += num_tokens - self._counted.get(index, 0)
        self._counted[index] = num_tokens
        seconds = time.monotonic() - self._start
        text = f"answers  {self._num_tokens / max(seconds, 1e-9):,.0f} tokens/s"
        self._bars.update(self._bar.id, text=text, num_tokens=self._num_tokens, seconds=seconds)
