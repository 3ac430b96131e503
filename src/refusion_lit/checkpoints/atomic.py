"""Checkpoint files that are written atomically and loaded as data only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from refusion_lit.checkpoints.stored import read_checkpoint
from refusion_lit.utils.errors import write_failure
from refusion_lit.utils.files import atomic_writer


class CheckpointWriteError(ValueError):
    """A checkpoint cannot be written; earlier checkpoints are intact."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint plugin with atomic writes and loading without code execution.

    A process that dies while writing leaves the old checkpoint under that name, or none. Remote paths go to Lightning's
    own plugin.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:  # noqa: ANN401 - Lightning's signature
        """Write a checkpoint.

        Raises:
            CheckpointWriteError: If it cannot be written, for lack of space or permission.
        """
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with atomic_writer(path) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch raises either for a failed write
            raise CheckpointWriteError(
                f"checkpoint: {path} cannot be written ({write_failure(error)}). Make room or choose another runs_dir, "
                "then resume with --ckpt_path last; earlier checkpoints are as they were."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,  # noqa: ANN401 - Lightning's signature
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Load a checkpoint to the CPU: tensors and plain values only, even with ``weights_only=False``.

        Raises:
            ValueError: If it is missing or damaged, or holds anything else.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(path)


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
