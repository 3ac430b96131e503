"""Which checkpoint of a directory is taken."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from refusion_lit.checkpoints.files import find_newest, newest_checkpoint


def test_a_training_resumes_from_the_newest_file_with_optimizer_states(tmp_path: Path) -> None:
    contents = {
        "older.ckpt": {"state_dict": {}, "optimizer_states": []},
        "last.ckpt": {"state_dict": {}, "optimizer_states": []},
        "weights.ckpt": {"state_dict": {}},
        "damaged.ckpt": None,
    }
    for age, (name, content) in enumerate(contents.items()):
        path = tmp_path / name
        if content is None:
            path.write_bytes(b"PK")
        else:
            torch.save(content, path)
        os.utime(path, (1000 + age, 1000 + age))
    assert newest_checkpoint([tmp_path]) == tmp_path / "weights.ckpt"
    assert find_newest([tmp_path], resumable=True) == (tmp_path / "last.ckpt", [tmp_path / "damaged.ckpt"])


def test_of_files_of_one_tick_of_the_clock_the_last_is_the_newest(tmp_path: Path) -> None:
    names = ["last.ckpt", *(f"epoch=0-step={step}.ckpt" for step in range(12))]  # listed in no order
    for name in names:
        torch.save({"state_dict": {}}, tmp_path / name)
        os.utime(tmp_path / name, (1000, 1000))
    assert newest_checkpoint([tmp_path]) == tmp_path / "last.ckpt"
