"""A fake of the package ``datasets``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

import pytest

from tasks.samples import ROWS


class Hub(ModuleType):
    """Stands in for the package ``datasets`` and serves one data set, at the address ``address``."""

    address = {"dataset": "some/rows", "dataset_name": "main"}

    def __init__(self) -> None:
        super().__init__("datasets")
        self.splits: Mapping[str, Sequence[Mapping[str, object]]] = {"train_sft": ROWS, "test": ROWS[:2]}

    def get_dataset_split_names(self, path: str, name: str | None) -> list[str]:
        if (path, name) != tuple(self.address.values()):
            raise FileNotFoundError(f"Dataset {path!r} does not exist.\nMore details.")
        return list(self.splits)

    def load_dataset(self, path: str, name: str | None, split: str) -> Sequence[Mapping[str, object]]:
        assert split in self.get_dataset_split_names(path, name)
        return self.splits[split]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake
