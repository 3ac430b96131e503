"""Progress of decoding: answers, tokens per second and time left, one line for each decoder."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from refusion_lit.decoding import Generation, GenerationCallback, RowState


@dataclass
class Pace:
    """What one decoder has done so far.

    Attributes:
        answers: Number of finished answers.
        tokens: Number of committed tokens.
        seconds: Time spent in calls of ``decode``.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def rate(self) -> str:
        """Return tokens per second."""
        return f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 else "0 tokens/s"


class AnswerProgress:
    """Shows a bar for each decoder on an interactive terminal, and nothing elsewhere.

    Args:
        console: Where to show them; standard error by default.

    Attributes:
        bars: The bars, each with a text; they disappear when they are stopped.
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
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
        self._tasks: dict[str, TaskID] = {}
        self.paces: dict[str, Pace] = {}

    def watch(self, name: str, total: int, finished: int = 0) -> GenerationCallback:
        """Return a callback for one call of ``decode``.

        Args:
            name: Name of the decoder; calls with the same name share a bar.
            total: Number of answers in all.
            finished: Number of answers that an interrupted run has left.
        """
        if name not in self._tasks:
            self.bars.start()
            self.paces[name] = Pace()
            self._tasks[name] = self.bars.add_task(name, total=total, completed=finished, text="answers")
        return _Watch(self.bars, self._tasks[name], self.paces[name])


class _Watch(GenerationCallback):
    """Counts the tokens and answers of one call."""

    def __init__(self, bars: Progress, task: TaskID, pace: Pace) -> None:
        self._bars = bars
        self._task = task
        self._pace = pace
        self._tokens: dict[int, int] = {}
        self._start = time.monotonic() - pace.seconds

    def on_commit(self, index: int, state: RowState) -> None:
        self._count(index, state.num_committed)

    def on_finished(self, index: int, generation: Generation) -> None:
        self._pace.answers += 1
        self._bars.advance(self._task)
        self._count(index, generation.num_tokens)  # less than was committed, if tokens follow the EOS token

    def _count(self, index: int, tokens: int) -> None:
        self._pace.tokens += tokens - self._tokens.get(index, 0)
        self._tokens[index] = tokens
        self._pace.seconds = time.monotonic() - self._start
        self._bars.update(self._task, text=f"answers  {self._pace.rate()}")
