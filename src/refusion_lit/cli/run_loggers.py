"""The loggers of a run: TensorBoard's events, and ``metrics.csv``, which a resumed run continues."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from refusion_lit.utils.files import read_text, write_atomically

METRICS = "metrics.csv"


def create_loggers(
    directory: Path, first_steps: tuple[int, int], others: Sequence[Logger] = (), *, writes: bool
) -> list[Logger]:
    """Return a run's loggers: TensorBoard if installed, ``metrics.csv``, and the user's loggers.

    Args:
        directory: The run's directory.
        first_steps: The first step that the run logs, and the step of its first validation. ``metrics.csv`` keeps
            the rows before these steps, and so does the file of a user's CSVLogger.
        others: The user's loggers.
        writes: Whether this process writes to the directory.
    """
    place = {"save_dir": directory.parent.parent, "name": directory.parent.name, "version": directory.name}
    losses = CSVLogger(**place, flush_logs_every_n_steps=1)  # so that a killed run leaves them
    for logger in (losses, *others) if writes else ():
        if type(logger) is CSVLogger:  # a subclass may have a writer of its own
            logger._experiment = _MetricsWriter(logger.log_dir, first_steps)
    return [*([_Events(**place)] if find_spec("tensorboard") else []), losses, *others]


class _MetricsWriter(ExperimentWriter):
    """Writes ``metrics.csv``. A resumed run keeps the rows of steps, and of validations, before ``first_steps``."""

    def __init__(self, log_dir: str, first_steps: tuple[int, int]) -> None:
        super().__init__(log_dir)
        self._first_steps = first_steps if Path(self.metrics_file_path).is_file() else None

    def _check_log_dir_exists(self) -> None:
        """Keep the file; Lightning would remove it."""

    def save(self) -> None:
        """Append new rows. The first call drops the rows of steps that are logged again."""
        path = Path(self.metrics_file_path)
        with _name_failed_file(str(path)):
            if self.metrics and self._first_steps is not None:
                reader = csv.DictReader(io.StringIO(read_text(path, "resume")))
                self.metrics_keys = list(reader.fieldnames or ())
                text = io.StringIO()
                writer = csv.DictWriter(text, self.metrics_keys, extrasaction="ignore")
                writer.writeheader()
                rows = [row for row in reader if str(row.get("step")).isdigit()]
                first, first_validation = self._first_steps
                firsts = [first_validation if row.get("val/loss") else first for row in rows]
                writer.writerows([row for row, limit in zip(rows, firsts, strict=True) if int(row["step"]) < limit])
                write_atomically(path, text.getvalue())
                self._first_steps = None
            super(ExperimentWriter, self).save()  # older versions of the class write an hparams.yaml, too


class _Events(TensorBoardLogger):
    """Writes TensorBoard's events, without an empty ``hparams.yaml`` and with file names in errors."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:  # noqa: ANN401 - importing its type takes long
        """Return TensorBoard's writer."""
        with self._writing():
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics."""
        with self._writing():
            super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        """Write buffered events."""
        with self._writing():
            super().save() if self.hparams else self.experiment.flush()

    def _writing(self) -> AbstractContextManager[None]:
        return _name_failed_file(f"{self.log_dir}/events.out.tfevents.*")


@contextmanager
def _name_failed_file(path: str) -> Iterator[None]:
    """Add the file's name to a write error, such as on a full disk."""
    try:
        yield
    except (OSError, ValueError) as error:
        failure = error if isinstance(error, OSError) else error.__cause__  # TensorBoardLogger wraps it
        if not isinstance(failure, OSError):
            raise
        failure.filename = failure.filename or path
        raise failure from None


@contextmanager
def quiet_writers() -> Iterator[None]:
    """Print no traceback of TensorBoard's thread for a failed write, because :class:`_Events` raises the error."""
    before = threading.excepthook

    def hook(args: Any) -> None:  # noqa: ANN401 - threading's type is private
        if not isinstance(args.exc_value, OSError) or not type(args.thread).__module__.startswith("tensorboard"):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
