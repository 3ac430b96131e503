"""The loggers of a run's directory: one ``metrics.csv`` for all resumes, and TensorBoard's events."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from refusion_lit.utils.errors import write_failure
from refusion_lit.utils.files import write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsFile(CSVLogger):
    """Writes ``metrics.csv``, and continues that of an interrupted run.

    Args:
        first_step: The first step that a resumed training logs; earlier rows stay. ``None`` for a new file.
        place: ``save_dir``, ``name`` and ``version``.
    """

    def __init__(self, first_step: int | None = None, **place: Any) -> None:  # noqa: ANN401
        super().__init__(**place, flush_logs_every_n_steps=1)  # so that a killed run leaves its losses
        self._first_step = first_step

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of the file."""
        if self._experiment is None:
            self._experiment = _Writer(self.log_dir, self._first_step)
        return self._experiment

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left; a failed run's own error says why it failed."""
        if status != "failed":
            super().finalize(status)


class _Writer(ExperimentWriter):
    def __init__(self, log_dir: str, first_step: int | None) -> None:
        super().__init__(log_dir)
        self._first_step = first_step

    def _check_log_dir_exists(self) -> None:
        """Keep the file, which Lightning would remove."""

    def save(self) -> None:
        """Append what was logged; at first, leave out earlier rows of steps that are trained again."""
        with _writing(self.metrics_file_path):
            if self.metrics and self._first_step is not None:
                self._continue(self._first_step)
                self._first_step = None
            super(ExperimentWriter, self).save()  # older versions of the class write an hparams.yaml, too

    def _continue(self, first_step: int) -> None:
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        rows = [row for row in reader if str(row.get("step")).isdigit() and int(row["step"]) < first_step]
        self.metrics_keys = list(reader.fieldnames or ())
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.metrics_keys, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(path, text.getvalue())


class Events(TensorBoardLogger):
    """Writes TensorBoard's events, without an empty ``hparams.yaml``."""

    @property
    def _files(self) -> str:
        return f"{self.log_dir}/events.out.tfevents.*"

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """TensorBoard's writer, whose thread writes the first event at once."""
        with _writing(self._files):
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics."""
        with _writing(self._files):
            super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        """Write what waits in memory."""
        with _writing(self._files):
            if self.hparams:
                super().save()
            else:
                self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file, unless the run has failed: its own error says why."""
        if status != "failed":
            with _writing(self._files):
                super().finalize(status)


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Name the file that cannot be written.

    Raises:
        ValueError: In place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"logger: {error.filename or path} cannot be written ({write_failure(error)}). Make room, then resume; "
            "checkpoints are as they were."
        ) from error


@contextmanager
def quiet_writers() -> Iterator[None]:
    """Print no traceback of TensorBoard's thread where it cannot write: :class:`Events` raises its error."""
    before = threading.excepthook

    def hook(args: Any) -> None:  # noqa: ANN401 - threading's type of it is private
        if not isinstance(args.exc_value, OSError) or not type(args.thread).__module__.startswith("tensorboard"):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
