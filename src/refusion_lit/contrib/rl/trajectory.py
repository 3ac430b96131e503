"""The trajectory record: in which forward and in which order each token of a response became final.

A directory holds safetensors files, ``PROCESS-NUMBER.safetensors``: a process writes one per batch, as a whole or not
at all, and the reader maps them into memory. Tensors are of 32-bit integers, named ``INDEX.ATTRIBUTE`` by the index of
their response in the file. The metadata have format, version and, as JSON, the other attributes of all responses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Int

from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.output import Generation, GenerationCallback
from refusion_lit.utils.files import write_atomically
from refusion_lit.utils.require import require

FORMAT = "refusion-lit trajectories"
VERSION = "2"
_ARRAYS = ("prompt_ids", "tokens", "rounds", "order", "draws")
_PLAIN = ("id", "num_tokens", "finish_reason", "num_forwards", "phases", "decoder")
_DTYPE = np.int32


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
    def slot_size(self) -> int | None:
        """Tokens per slot: place p is in slot ``p // slot_size``; ``None`` for a decoder without slots."""
        return self.decoder.get("slot_size")


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
        if state is None:
            return
        is_masked = np.array(state.is_masked, dtype=bool)
        order = np.full(len(state.tokens), -1, dtype=_DTYPE)
        order[state.committed] = np.arange(state.num_committed)
        draws = [
            (number, position - state.prompt_length, token)
            for number, entry in enumerate(generation.trace, 1)
            for position, token in zip(entry.positions, entry.tokens, strict=True)
        ]
        self.trajectories[index] = Trajectory(
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
            decoder={"class": type(self.decoder).__name__, **asdict(self.decoder)},  # type: ignore[call-overload]
        )


class TrajectoryWriter:
    """Adds trajectories to a record, as one process of a run.

    Args:
        directory: The record's directory.
        resume: Keep what this process has written; of a response that is written again, the last one counts.
        rank: Index of this process.
    """

    def __init__(self, directory: Path, *, resume: bool = False, rank: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._stem = directory / f"{rank:04}"
        written = list(directory.glob(f"{rank:04}-*"))
        self._num_files = len(written) if resume else 0
        for file in [] if resume else written:
            file.unlink()

    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write trajectories, if there are any, to a file of their own."""
        if trajectories:
            named = {f"{i}.{name}": getattr(each, name) for i, each in enumerate(trajectories) for name in _ARRAYS}
            rows = json.dumps([{name: getattr(each, name) for name in _PLAIN} for each in trajectories])
            content = safetensors.numpy.save(named, {"format": FORMAT, "version": VERSION, "rows": rows})
            write_atomically(f"{self._stem}-{self._num_files:06}.safetensors", content)
            self._num_files += 1


def read_trajectories(directory: str | Path) -> list[Trajectory]:
    """Return the trajectories recorded in a directory; their arrays are memory-mapped and read only.

    Args:
        directory: What :class:`TrajectoryWriter` wrote.

    Raises:
        ValueError: If there is no record, it has another version, or a file is damaged. Records are never repaired.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    fix = "record them with TrajectoryRecorder and TrajectoryWriter"
    require(bool(files), "trajectories", "a directory of recorded trajectories", str(directory), fix)
    return list({each.id: each for file in files for each in _read(file)}.values())


def _read(path: Path) -> list[Trajectory]:
    fix = "record them again with this version of refusion-lit"
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
            found = (about.get("format"), about.get("version"))
            require(found == (FORMAT, VERSION), "trajectories", f"{FORMAT}, version {VERSION}, in {path}", found, fix)
            rows = json.loads(about["rows"])
            arrays = [{name: file.get_tensor(f"{i}.{name}").numpy() for name in _ARRAYS} for i in range(len(rows))]
        trajectories = [Trajectory(**own, **row) for own, row in zip(arrays, rows, strict=True)]
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"trajectories: expected a whole record in {path}, got {error}; {fix}.") from error
    for array in (array for own in arrays for array in own.values()):
        array.flags.writeable = False
    return trajectories
