"""Files are replaced atomically, whatever happens during a write, and read with one kind of line end."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from refusion_lit.utils.files import (
    atomic_writer,
    read_object,
    read_text,
    write_atomically,
    write_json_atomically,
)


@pytest.mark.parametrize("content", ["zwölf\n", b"\x00\xff"])
def test_content_replaces_what_was_there_and_directories_are_created(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for _ in range(2):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode("utf-8") if isinstance(content, str) else content)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_json_reads_back(tmp_path: Path) -> None:
    values = {"a": [1, 2.5, None], "b": "ü"}
    write_json_atomically(str(tmp_path / "x.json"), values)
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == read_object(tmp_path / "x.json") == values


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[1]", None])
def test_a_file_without_an_object_reads_as_an_empty_one(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    assert read_object(tmp_path / "x.json") == {}
    assert read_object(tmp_path) == {}


def test_text_has_no_byte_order_mark_and_one_kind_of_line_end(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffzwölf\r\nb\rc\n".encode())
    assert read_text(path, "prompts") == "zwölf\nb\nc\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latin", r"prompts: .*latin is not UTF-8 text \(.*\); convert it\."),
        ("none", r"prompts: expected a list, got .*none \(No such file or directory\); check the path\."),
        (".", r"prompts: expected a list, got .* \(Is a directory\); check the path\."),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_text(tmp_path / name, "prompts", "a list")


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with atomic_writer(path) as file:
            file.write(b"half of it")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_new_file_is_complete_before_it_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_writer(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_the_unfinished_file_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    dying = (
        "import os, sys; from refusion_lit.utils.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as file: file.write(b'a long content'); file.flush(); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", dying, tmp_path / "file"], check=True, env=environment)
    assert not (tmp_path / "file").exists()
    assert len(list(tmp_path.iterdir())) == 1
    write_atomically(tmp_path / "file", "short")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "short"


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
