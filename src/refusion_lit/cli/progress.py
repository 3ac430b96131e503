"""Progress of decoding: answers, tokens per second and time left, one line for each decoder."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from refusion_lit.decoding import Generation, GenerationCallback, RowState


class Pace(GenerationCallback):
    """Counts what one decoder has done so far, and moves its bar.

    Attributes:
        answers: Number of finished answers.
        tokens: Number of committed tokens.
        seconds: Time spent in calls of ``decode``.
    """

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self.answers = self.tokens = 0
        self.seconds = 0.0
        self._bars = bars
        self._task = task

    def begin(self) -> None:
        """Begin a call of ``decode``, which numbers its prompts from 0."""
        self._tokens: dict[int, int] = {}
        self._start = time.monotonic() - self.seconds

    def rate(self) -> str:
        """Return tokens per second."""
        return f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 else "0 tokens/s"

    def on_commit(self, index: int, state: RowState) -> None:
        """Count new tokens."""
        self._count(index, state.num_committed)

    def on_finished(self, index: int, generation: Generation) -> None:
        """Count an answer, and what is left of its tokens."""
        self.answers += 1
        self._bars.advance(self._task)
        self._count(index, generation.num_tokens)  # less than was committed, if tokens follow the EOS token

    def _count(self, index: int, tokens: int) -> None:
        self.tokens += tokens - self._tokens.get(index, 0)
        self._tokens[index] = tokens
        self.seconds = time.monotonic() - self._start
        self._bars.update(self._task, text=f"answers  {self.rate()}")


class AnswerProgress(Progress):
    """Shows a bar for each decoder until it is stopped, on an interactive terminal, and nothing elsewhere.

    Args:
        console: Where to show them; standard error by default.

    Attributes:
        paces: What each decoder has done, by its name.
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
        super().__init__(*columns, console=console, transient=True, disable=not console.is_interactive)
        self.paces: dict[str, Pace] = {}

    def watch(self, name: str, total: int, finished: int = 0) -> GenerationCallback:
        """Return a callback for one call of ``decode``.

        Args:
            name: Name of the decoder; calls with the same name share a bar.
            total: Number of answers in all.
            finished: Number of answers that an interrupted run has left.
        """
        if name not in self.paces:
            self.start()
            task = self.add_task(name, total=total, completed=finished, text="answers")
            self.paces[name] = Pace(self, task)
        self.paces[name].begin()
        return self.paces[name]
