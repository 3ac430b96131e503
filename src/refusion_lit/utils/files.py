"""Files: atomic writes (a reader sees the old or the new file, never a part), reads, locks, fingerprints.

Locks between processes are filelock's: they are held until they are released or the process ends in any way. A
fingerprint lists a file's inputs as JSON values, which are compared before the file is used again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock as Lock
from filelock import Timeout

from refusion_lit.utils.require import require

Fingerprint = Mapping[str, Any]
"""A file's inputs: JSON values by name; ``None`` for an unknown input."""

_NUM_SHOWN = 3


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` when the block ends without an error.

    The content goes to a hidden file in the same directory, is synced to disk and then renamed. If the block raises,
    the hidden file is removed and ``path`` keeps its old content; if the process is killed, the next write to ``path``
    overwrites the hidden file. Only one process may write to a path at a time.

    Args:
        path: The file to replace; missing parent directories are created.

    Yields:
        A binary file.

    Raises:
        OSError: If the file cannot be written, for example for lack of space or permission.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        # A failed write, as on a full disk, names no file; other failures name the hidden file.
        if isinstance(error, OSError) and error.filename in (None, str(unfinished)):
            error.filename, error.filename2 = str(target), None
        raise
    with suppress(OSError):  # sync the renaming too, on systems that let a directory be opened
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Replace a file's content atomically; see :func:`atomic_writer`.

    Args:
        path: The file; missing parent directories are created.
        content: Text, written as UTF-8, or bytes.

    Raises:
        OSError: If the file cannot be written.
    """
    with atomic_writer(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json_atomically(path: str | Path, values: Any) -> None:  # noqa: ANN401 - any JSON value
    """Replace a file's content by indented JSON; see :func:`atomic_writer`.

    Raises:
        OSError: If the file cannot be written.
    """
    write_atomically(path, json.dumps(values, indent=2) + "\n")


def require_free(
    output: Path,
    kind: str = "",
    *,
    is_kind: bool = False,
    source: str | Path | None = None,
    fix: str = "remove it first",
) -> None:
    """Refuse an output file that cannot be written, is an input, or holds other data.

    Args:
        output: The file, which the option ``output`` names.
        kind: Contents that may be overwritten, in words; by default the file must be new.
        is_kind: Whether the file has contents of this kind.
        source: A file that the command reads, if any.
        fix: An alternative to choosing another name.
    """
    directory = output.resolve().parent
    require(directory.is_dir(), "output", "a file in a directory that exists", str(output), f"create {directory} first")
    require_writable(directory, "output")
    require(not output.is_dir(), "output", "a file", str(output), "name a file in that directory")
    is_other = source is None or output.resolve() != Path(source).resolve()
    require(is_other, "output", "a file other than the input file", str(output), "choose another name")
    expected = f"a new file{f', or one with {kind}' if kind else ''}"
    got = f"{output}, a file of another kind"
    require(is_kind or not output.exists(), "output", expected, got, f"choose another name, or {fix}")


def require_empty(output: Path) -> None:
    """Refuse an output directory that is a file, is not empty or cannot be written."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    require(is_free, "output", "a new or empty directory", str(output), "choose another directory")
    require_writable(output, "output")


def require_writable(directory: Path, option: str) -> None:
    """Refuse a directory that cannot be written, or cannot be created; called before work starts.

    Args:
        directory: The directory, which need not exist.
        option: The option that names it.
    """
    exists = next(path for path in (directory.resolve(), *directory.resolve().parents) if path.exists())
    is_writable = exists.is_dir() and os.access(exists, os.W_OK | os.X_OK)
    reason = "may not be written" if exists.is_dir() else "is a file"
    require(
        is_writable, option, "a directory that can be written", f"{directory}: {exists} {reason}", "choose another one"
    )


def read_text(path: str | Path, option: str, expected: str = "a file") -> str:
    """Return the text of a UTF-8 file that a user named, without byte order mark, and with line feeds as line ends.

    Args:
        path: The file.
        option: The option that names the file, for messages.
        expected: The kind of file in words, for messages.

    Raises:
        ValueError: If the file cannot be read or is not UTF-8.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: expected {expected}, got {path} ({error.strerror}); check the path.") from error
    return decode_text(content, str(path), option)


def decode_text(content: bytes, source: str, option: str) -> str:
    """Decode UTF-8 text like :func:`read_text`; ``source`` names the origin of the bytes in messages."""
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {source} is not UTF-8 text ({error.reason}); convert it.") from error


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty mapping if the file is missing or not a JSON object."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # json nests as deep as the interpreter's stack
        return {}
    return values if isinstance(values, dict) else {}


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Read a YAML file of options.

    Args:
        path: The file.
        option: The option that names the file, for messages.

    Returns:
        A mapping of options; the values are texts, numbers, booleans, nulls, and lists and mappings of these.

    Raises:
        ValueError: If the file is missing, is not YAML, or has other contents.
    """
    import yaml  # most commands read no YAML

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # noqa: ANN401 - a text or null
            node = super().compose_mapping_node(anchor)
            names = set()
            for key, _ in node.value:
                if key.value in names:  # PyYAML would silently keep the last value
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                names.add(key.value)
            return node

    text = read_text(path, option, "a YAML file")
    try:
        # JSON has no dates, no sets and no lists that contain themselves.
        values = json.loads(json.dumps(yaml.load(text, Loader)))
    # PyYAML does not catch errors of Python's conversions, for example of !!int x or the date 2001-99-99.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{option}: {path} is not YAML of texts, numbers, lists and groups ({reason}); correct the file."
        ) from error
    if values is None:
        raise ValueError(f"{option}: expected a mapping of options in {path}, got an empty file; leave it out.")
    if not isinstance(values, dict):
        got = type(values).__name__
        raise ValueError(f"{option}: expected a mapping of options in {path}, got {got}; write them as NAME: VALUE.")
    return values


def acquire_lock(path: Path, option: str, process: str, fix: str) -> Lock:
    """Lock a file without waiting; missing parent directories are created.

    Args:
        path: The file.
        option: The option that determines the file, for messages.
        process: The process that would hold the lock, in words, for the message ``expected no ...``.
        fix: What to do if the lock is held, as an imperative without a full stop.

    Raises:
        OSError: If the file cannot be created.
        ValueError: If another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"{option}: expected no {process}, got one that is still running; {fix}.") from error
    return lock


def release_lock(lock: Lock) -> None:
    """Release a lock and remove its file."""
    Path(lock.lock_file).unlink(missing_ok=True)  # before unlocking: no other process can lock a removed file
    lock.release()


def digest(values: object) -> str:
    """Hash JSON values to 16 hexadecimal digits, the same in every process."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompts_fingerprint(prompts: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Return number and digest of prompts, given with their ids; their order does not matter."""
    pairs = sorted((identity, digest(prompt)) for identity, prompt in prompts)
    return {"num_prompts": len(pairs), "digest": digest(pairs)}


def meta_path(file: Path) -> Path:
    """Return the path of a file's fingerprint, ``NAME.meta.json`` in the same directory."""
    return Path(f"{file}.meta.json")  # with_name refuses names such as "."


def read_fingerprint(file: Path) -> Fingerprint | None:
    """Return a file's fingerprint; ``None`` for files that this package did not write."""
    fingerprint = read_object(meta_path(file)).get("fingerprint")
    return fingerprint if isinstance(fingerprint, dict) else None


def check_fingerprint(option: str, name: str, recorded: Fingerprint, current: Fingerprint, *, fix: str) -> None:
    """Refuse a file whose fingerprint differs from the present inputs.

    Args:
        option: The option that names the file.
        name: The file.
        recorded: The file's fingerprint.
        current: The fingerprint of the present inputs. Only names in both fingerprints are compared.
        fix: What to do, as an imperative without a full stop.

    Raises:
        ValueError: Naming the differences, with both values.
    """
    shared = [key for key in recorded.keys() & current.keys() if None not in (recorded[key], current[key])]
    changes = [*differences({key: recorded[key] for key in shared}, {key: current[key] for key in shared})]
    if changes:
        more = f" and {len(changes) - _NUM_SHOWN} more" if len(changes) > _NUM_SHOWN else ""
        listed = "; ".join(f"{key} was {before!r}, is {now!r}" for key, before, now in changes[:_NUM_SHOWN])
        raise ValueError(
            f"{option}: {name} was made with another model, other data or other options: {listed}{more}. {fix}."
        )


def differences(before: object, after: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the differences between two nested mappings: the dotted name, and both values."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    elif before != after:
        yield name, before, after
