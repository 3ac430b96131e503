"""Progress bars of decoding: finished answers, tokens per second and time left, with a bar for each decoder."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from refusion_lit.decoding import Generation, GenerationCallback, RowState


class Pace(GenerationCallback):
    """Counts the answers and tokens of a decoder, and moves the decoder's bar.

    Attributes:
        num_answers: Number of finished answers.
        num_tokens: Number of committed tokens.
        seconds: Time spent in calls of ``decode``.
    """

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self.num_answers = self.num_tokens = 0
        self.seconds = 0.0
        self._bars = bars
        self._task = task
        self._counted: dict[int, int] = {}
        self._start = time.monotonic()

    def begin(self) -> None:
        """Begin a call of ``decode``, which numbers its prompts from 0."""
        self._counted.clear()
        self._start = time.monotonic() - self.seconds

    def rate(self) -> str:
        """Return tokens per second."""
        return f"{self.num_tokens / self.seconds:,.0f} tokens/s" if self.seconds > 0 else "0 tokens/s"

    def on_commit(self, index: int, state: RowState) -> None:
        """Count new tokens."""
        self._count(index, state.num_committed)

    def on_finished(self, index: int, generation: Generation) -> None:
        """Count an answer. The tokens after its EOS token, which were committed before, are subtracted."""
        self.num_answers += 1
        self._bars.advance(self._task)
        self._count(index, generation.num_tokens)

    def _count(self, index: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens - self._counted.get(index, 0)
        self._counted[index] = num_tokens
        self.seconds = time.monotonic() - self._start
        self._bars.update(self._task, text=f"answers  {self.rate()}")


class DecodingProgress(Progress):
    """Shows bars on an interactive terminal until it is stopped, and nothing elsewhere.

    Args:
        console: Where to show the bars; standard error by default.

    Attributes:
        paces: Counts per decoder name.
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
        # Speeds and times left are of the last 1 000 updates, which rich keeps, not of the last 30 seconds.
        options = {"transient": True, "disable": not console.is_interactive, "speed_estimate_period": float("inf")}
        super().__init__(*columns, console=console, **options)
        self.paces: dict[str, Pace] = {}

    def watch(self, name: str, total: int, finished: int = 0) -> GenerationCallback:
        """Return a callback for one call of ``decode``.

        Args:
            name: Name of the decoder; calls with the same name share a bar.
            total: Number of all answers.
            finished: Number of answers from an interrupted run.
        """
        if name not in self.paces:
            self.start()
            self.paces[name] = Pace(self, self.add_task(name, total=total, completed=finished, text="answers"))
        self.paces[name].begin()
        return self.paces[name]
