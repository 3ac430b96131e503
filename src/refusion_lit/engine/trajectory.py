"""The trajectory record: in which forward and in which order each token of a response became final.

A directory holds a pair of files for each process that wrote. ``N.jsonl`` has a header line with format and version,
then a line for each response. ``N.bin`` has the responses' arrays as 32-bit little-endian integers, one after
the other, and is memory-mapped by the reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.output import Generation, GenerationCallback
from refusion_lit.utils.require import require

FORMAT = "refusion-lit trajectories"
VERSION = 1
_PLAIN = ("id", "num_tokens", "finish_reason", "num_forwards", "phases", "decoder")
_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """How a response was decoded.

    The arrays cover the whole canvas, also what lies after the EOS token: in block-causal and bidirectional
    models it took part in decisions about the text before it.

    Attributes:
        id: The prompt's id.
        prompt_ids: Prompt tokens.
        tokens: Token of each place of the canvas; -1 where none became final.
        rounds: Number of the forward, from 1, in which each place became final; 0 for given and for masked places.
        order: Rank of each place in the order in which places became final; -1 for given and for masked places.
        draws: All tokens that the decoder drew, discarded ones included: number of the forward, place, token. Empty
            unless the decode was traced.
        num_tokens: Length of the response, EOS token included.
        finish_reason: As in :class:`~refusion_lit.decoding.Generation`.
        num_forwards: Forwards of the whole decode.
        phases: Purpose of each forward; empty unless the decode was traced.
        decoder: The decoder's class and a mapping of its options.
    """

    id: str
    prompt_ids: Int[np.ndarray, " token"]
    tokens: Int[np.ndarray, " place"]
    rounds: Int[np.ndarray, " place"]
    order: Int[np.ndarray, " place"]
    draws: Int[np.ndarray, "draw 3"]
    num_tokens: int
    finish_reason: str
    num_forwards: int
    phases: Sequence[str]
    decoder: Mapping[str, Any]

    @property
    def response_ids(self) -> list[int]:
        """The response's tokens."""
        return self.tokens[: self.num_tokens].tolist()

    @property
    def slot_size(self) -> int | None:
        """Tokens per slot: place p is in slot ``p // slot_size``; ``None`` for a decoder without slots."""
        return self.decoder.get("slot_size")

    @classmethod
    def of(cls, state: RowState, generation: Generation, decoder: Decoder) -> Trajectory:
        """Return the trajectory of a finished prompt.

        Args:
            state: The decoder's last state.
            generation: The result; its draws are recorded if it has a trace.
            decoder: The decoder that ran.
        """
        is_masked = np.array(state.is_masked, dtype=bool)
        order = np.full(len(state.tokens), -1, dtype=_DTYPE)
        order[state.committed] = np.arange(len(state.committed))
        draws = [
            (number, position - state.prompt_length, token)
            for number, entry in enumerate(generation.trace, 1)
            for position, token in zip(entry.positions, entry.tokens, strict=True)
        ]
        return cls(
            id=generation.id,
            prompt_ids=np.array(state.prompt.token_ids, dtype=_DTYPE),
            tokens=np.where(is_masked, -1, state.tokens).astype(_DTYPE),
            rounds=np.where(is_masked, 0, state.commit_rounds).astype(_DTYPE),
            order=order,
            draws=np.array(draws, dtype=_DTYPE).reshape(-1, 3),
            num_tokens=len(generation.token_ids),
            finish_reason=generation.finish_reason,
            num_forwards=generation.num_forwards,
            phases=[entry.phase for entry in generation.trace],
            decoder={"class": type(decoder).__name__, **asdict(decoder)},  # type: ignore[call-overload] - all are
        )


class TrajectoryRecorder(GenerationCallback):
    """Collects the trajectories of a decode; pass it as a callback.

    Args:
        decoder: The decoder that runs.

    Attributes:
        trajectories: Those of finished prompts, by index of the prompt.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.trajectories: dict[int, Trajectory] = {}
        self._states: dict[int, RowState] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        """Keep a prompt's state, which the engine updates in place."""
        self._states[index] = state

    def on_finished(self, index: int, generation: Generation) -> None:
        """Record a finished prompt; a response that was given as a whole has no trajectory."""
        state = self._states.pop(index, None)
        if state is not None:
            self.trajectories[index] = Trajectory.of(state, generation, self.decoder)


class TrajectoryWriter:
    """Appends trajectories to the files of one process.

    Args:
        directory: The record's directory.
        kept: Ids of responses that stay; what an interrupted run has written besides is dropped. Empty: overwrite.
        rank: Index of this process.
    """

    def __init__(self, directory: Path, *, kept: Iterable[str] = (), rank: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._index = directory / f"{rank}.jsonl"
        self._data = directory / f"{rank}.bin"
        self._size = 0
        names = set(kept)
        found = _read(self._index, resumed=True) if names and self._index.is_file() else []
        old = [each for each in found if each.id in names]
        arrays = [_flat(trajectory) for trajectory in old]  # copies, before their file is emptied
        self._data.write_bytes(b"")
        self._index.write_text(json.dumps({"format": FORMAT, "version": VERSION}) + "\n", encoding="utf-8")
        self._append(old, arrays)

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Append trajectories: first their arrays, then the lines that refer to them."""
        self._append(trajectories, [_flat(trajectory) for trajectory in trajectories])

    def _append(self, trajectories: Sequence[Trajectory], arrays: Sequence[np.ndarray]) -> None:
        with self._data.open("ab") as data:
            for array in arrays:
                data.write(array.tobytes())
        with self._index.open("a", encoding="utf-8") as index:
            for trajectory, array in zip(trajectories, arrays, strict=True):
                sizes = (len(trajectory.prompt_ids), len(trajectory.tokens), len(trajectory.draws))
                own = {name: getattr(trajectory, name) for name in _PLAIN}
                index.write(json.dumps({**own, "start": self._size, "sizes": sizes}) + "\n")
                self._size += len(array)


def read_trajectories(directory: str | Path) -> list[Trajectory]:
    """Return the trajectories recorded in a directory; their arrays are memory-mapped and read only.

    Args:
        directory: What ``predict`` with ``record_trajectories`` wrote.

    Raises:
        ValueError: If there is no record, it has another version, or a field or part of the data is missing. Records
            are never repaired.
    """
    paths = sorted(Path(directory).glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
    fix = "record them with predict --model.decoding.record_trajectories true"
    require(bool(paths), "trajectories", "a directory of recorded trajectories", str(directory), fix)
    return [trajectory for path in paths for trajectory in _read(path)]


def _read(index: Path, *, resumed: bool = False) -> list[Trajectory]:
    """Return the trajectories of one process; when it is resumed, without a last line that a kill or full disk cut."""
    text = index.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1] if resumed else text
    header, *lines = [_parsed(line) for line in whole.splitlines()] or [{}]
    found = (header.get("format"), header.get("version"))
    fix = "record them again with this version of refusion-lit"
    require(found == (FORMAT, VERSION), "trajectories", f"{FORMAT}, version {VERSION}, in {index}", found, fix)
    path = index.with_suffix(".bin")
    data = np.memmap(path, dtype=_DTYPE, mode="r") if path.is_file() and path.stat().st_size else np.empty(0, _DTYPE)
    trajectories = []
    for line in lines:
        missing = {*_PLAIN, "start", "sizes"} - line.keys()
        require(not missing, "trajectories", f"all fields in {index}", f"none for {', '.join(sorted(missing))}", fix)
        num_prompt, num_places, num_draws = line["sizes"]
        size = num_prompt + 3 * num_places + 3 * num_draws
        values = data[line["start"] : line["start"] + size]
        require(len(values) == size, "trajectories", f"{size} more numbers in {path}", len(values), fix)
        prompt_ids, tokens, rounds, order, draws = np.split(values, [num_prompt + i * num_places for i in range(4)])
        own = {name: line[name] for name in _PLAIN}
        arrays = {"prompt_ids": prompt_ids, "tokens": tokens, "rounds": rounds, "order": order}
        trajectories.append(Trajectory(**arrays, draws=draws.reshape(-1, 3), **own))
    return trajectories


def _flat(trajectory: Trajectory) -> Int[np.ndarray, " number"]:
    parts = (trajectory.prompt_ids, trajectory.tokens, trajectory.rounds, trajectory.order, trajectory.draws.ravel())
    return np.concatenate(parts).astype(_DTYPE)


def _parsed(line: str) -> dict[str, Any]:
    """Return a line's values; none if it is no JSON object."""
    try:
        values = json.loads(line)
    except ValueError:
        values = {}
    return values if isinstance(values, dict) else {}
