"""Data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refusion_lit.tasks.base import Task
from refusion_lit.utils.errors import reason_of
from refusion_lit.utils.require import require


@dataclass(frozen=True, kw_only=True)
class HubTask(Task):
    """A task whose examples may be rows of a hub data set.

    Attributes:
        dataset: Id of a hub data set to use instead of files (``pip install datasets``).
        dataset_name: Configuration of the data set.
        dataset_revision: Revision of the data set.
    """

    dataset: str | None = None
    dataset_name: str | None = None
    dataset_revision: str | None = None

    @cached_property
    def hub_splits(self) -> list[str]:
        """The splits of ``dataset``; none without one."""
        return [] if self.dataset is None else self._from_hub("get_dataset_split_names")

    def hub_rows(self, split: str) -> Iterable[Mapping[str, Any]]:
        """Return the rows of a split of ``dataset``.

        Raises:
            ValueError: If it has no such split, or cannot be loaded.
        """
        known = ", ".join(self.hub_splits)
        fix = f"it has {known}: choose from these in task.train, task.validation and task.test"
        require(split in self.hub_splits, "task.dataset", f"a split of {self.dataset}", split, fix)
        return self._from_hub("load_dataset", split=split)

    def _from_hub(self, function: str, **options: str) -> Any:  # noqa: ANN401
        """Call a function of the package ``datasets`` for the data set; its errors become a one-line ``ValueError``."""
        try:
            import datasets  # pyright: ignore[reportMissingImports] - an extra
        except ImportError as error:
            raise ValueError("task.dataset: needs the package datasets; run pip install datasets.") from error
        try:
            call = getattr(datasets, function)
            return call(self.dataset, self.dataset_name, revision=self.dataset_revision, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"task.dataset: the hub data set {self.dataset!r} cannot be loaded ({reason_of(error)}). "
                "Check task.dataset, task.dataset_name and task.dataset_revision, and the network."
            ) from error
