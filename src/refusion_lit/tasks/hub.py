"""Reads rows of instruction data from data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refusion_lit.tasks.readers import Row
from refusion_lit.utils.errors import reason_of


@dataclass(frozen=True)
class HubDataset:
    """A data set of the hub.

    Attributes:
        id: Its id.
        config: Its configuration; ``None``: the default one.
        revision: Its revision; ``None``: the newest.
    """

    id: str
    config: str | None = None
    revision: str | None = None

    @cached_property
    def splits(self) -> list[str]:
        """Names of its splits."""
        with self._errors():
            return _datasets().get_dataset_split_names(self.id, self.config, revision=self.revision)

    def rows(self, split: str) -> Iterator[Row]:
        """Return the rows of a split.

        Raises:
            ValueError: If there is no such split, or it cannot be loaded.
        """
        if split not in self.splits:
            raise ValueError(
                f"task.dataset: expected a split of {self.id}, got {split!r}; it has {', '.join(self.splits)}. "
                "Choose from these in task.train, task.validation and task.test."
            )
        with self._errors():
            loaded = _datasets().load_dataset(self.id, self.config, split=split, revision=self.revision)
        return (Row(f"{self.id}/{split}", number, dict(values)) for number, values in enumerate(loaded, start=1))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the hub into a one-line ``ValueError``."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            if str(error).startswith("task."):
                raise
            raise ValueError(
                f"task.dataset: the hub data set {self.id!r} cannot be loaded ({reason_of(error)}). "
                "Check task.dataset, task.dataset_name and task.dataset_revision, and the network."
            ) from error


def _datasets() -> Any:  # noqa: ANN401 - a module
    try:
        import datasets  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise ValueError("task.dataset: needs the package datasets; run pip install datasets.") from error
    return datasets
