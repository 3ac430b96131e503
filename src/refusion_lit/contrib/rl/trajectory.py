"""Trajectories: records in which forward and in which order a response's tokens became final."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from refusion_lit.engine.decoder import Decoder, RowState
from refusion_lit.engine.output import Generation, GenerationCallback

_DTYPE = np.int32


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """How a response was decoded.

    The arrays cover the whole canvas, including places after the EOS token: in block-causal and bidirectional models
    these places influenced decisions about the text before them.

    Attributes:
        id: Id of the prompt.
        prompt_ids: Prompt tokens.
        tokens: Final token by place; -1 at masked places.
        rounds: Number of the forward, from 1, in which the place became final; 0 at given and masked places.
        order: The place's rank in the order of becoming final; -1 at given and masked places.
        draws: All drawn tokens, including discarded tokens, as (number of the forward, place, token). Empty unless the
            decode was traced.
        num_tokens: Length of the response, EOS token included.
        finish_reason: As in :class:`~refusion_lit.decoding.Generation`.
        num_forwards: Number of forwards.
        phases: Purposes of the forwards; empty unless the decode was traced.
        decoder: Name (``class``) and options of the decoder.
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
        """Tokens per slot: place p is in slot ``p // slot_size``. ``None`` for decoders without slots."""
        return self.decoder.get("slot_size")


class TrajectoryRecorder(GenerationCallback):
    """Callback that records a decode's trajectories.

    Args:
        decoder: The decoder that runs.

    Attributes:
        trajectories: Trajectories of finished prompts, by index of the prompt.

    >>> import refusion_lit
    >>> from refusion_lit.decoding import ReFusion
    >>> from refusion_lit.types import Prompt, SamplingParams
    >>> model = refusion_lit.load("tests/goldens/models/additions-clean")
    >>> decoder = ReFusion(slot_size=4)
    >>> recorder = TrajectoryRecorder(decoder)
    >>> prompt = Prompt(token_ids=tuple(model.encode("12+34,56+78>")), id="sums")
    >>> output = model.decode([prompt], decoder, SamplingParams(max_new_tokens=20), callbacks=[recorder])
    >>> recorder.trajectories[0].rounds[:20].tolist()  # places became final in forwards 2 and 3
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.trajectories: dict[int, Trajectory] = {}
        self._states: dict[int, RowState] = {}

    def on_commit(self, index: int, state: RowState) -> None:
        """Keep the state of a prompt, which the engine updates in place."""
        self._states[index] = state

    def on_finished(self, index: int, generation: Generation) -> None:
        """Record a finished prompt; a completely given response has no trajectory."""
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
