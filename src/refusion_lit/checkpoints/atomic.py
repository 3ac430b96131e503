"""Checkpoint files that are written atomically and loaded as data only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from refusion_lit.checkpoints.metadata import read_checkpoint


class CheckpointWriteError(ValueError):
    """A checkpoint cannot be written; the earlier ones are as they were."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it once it is on the disk.

    Whenever the process dies, the file of that name is the old one or the new one, never a part of either. Loading
    runs nothing that a file brings along.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:  # noqa: ANN401 - Lightning's signature
        """Write a checkpoint.

        Raises:
            CheckpointWriteError: If it cannot be written (no space, no permission).
        """
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        unfinished = target.with_name(f".{target.name}.unfinished")  # one that a killed process left is overwritten
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
            _sync_directory(target.parent)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as the one or the other
            reason = _reason(error)
            unfinished.unlink(missing_ok=True) if target.parent.is_dir() else None
            raise CheckpointWriteError(
                f"checkpoint: {target} cannot be written ({reason}). Make room or choose another runs_dir, then go on "
                "with --ckpt_path last; earlier checkpoints are as they were."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = None,  # noqa: ANN401 - Lightning's signature
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Load a checkpoint to the CPU: tensors and plain values only, whatever ``weights_only`` says.

        Raises:
            ValueError: If it is missing, damaged or holds anything else.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(path)


def newest_checkpoint(folders: list[Path]) -> Path | None:
    """Return the checkpoint that was written last, in these directories or below.

    Damaged files, which only other programs leave, are passed over.
    """
    found = [path for folder in folders for path in folder.rglob("*.ckpt") if not path.name.startswith(".")]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if _is_whole(path):
            return path
    return None


def _is_whole(path: Path) -> bool:
    if path.is_dir():  # strategies that shard write directories, this file last
        return (path / "meta.pt").is_file()
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whatever a damaged file brings about
        return False
    return True


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _sync_directory(directory: Path) -> None:
    """Have the renaming itself on the disk, where the system lets directories be opened."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Return the system's reason for a failed write, which torch may have wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
