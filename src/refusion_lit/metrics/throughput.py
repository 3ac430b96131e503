"""How fast a decoder is, by the metrics contract: ratios of totals, counted at the call of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from refusion_lit.decoding import DecodingOutput


class DecodingMetrics(Metric):
    """Score, forwards, tokens per forward and tokens per second of one decoder over a test set.

    ``docs/metrics.md`` defines every figure exactly.

    * ``score``: mean score of the responses, in [0, 1].
    * ``tokens_per_forward``: committed tokens (end of sequence counted, nothing after it) over the forwards in
      which each prompt took part; a ratio of totals that does not depend on the batch size.
    * ``tokens_per_second``: committed tokens over seconds of decoding with a synchronised clock; the first
      ``warm_up`` batches are left out where more follow. Prompt tokens do not count.
    * ``tokens_per_call``: committed tokens over calls of the model, which does grow with the batch size.
    * ``calls_per_batch``: calls of the model over batches of the test set.
    * ``positions_per_token``: token positions computed, padding excluded, over committed tokens.
    * ``latency_median``, ``latency_p95``: seconds from a prompt's first forward to its end, in the batches that
      ``tokens_per_second`` is taken over.
    * ``paper_tokens_per_forward``: mean over rounds of committed tokens a forward, which the released program
      prints. For comparison with published figures only.

    Several processes give what one process gives over all prompts, however they share them, except that each leaves
    out its own warm-up; ``seconds`` are those of all processes added up, so ``tokens_per_second`` is a process's.

    Args:
        warm_up: Batches whose time is left out, on each process, and again on one that goes on from a snapshot.
    """

    full_state_update = False
    # A process without prompts adds nothing, which is no reason for torchmetrics to warn.
    update_called = True  # pyright: ignore[reportAssignmentType]
    totals: Tensor
    timed: Tensor
    latencies: Tensor

    _FIELDS = ("num_prompts", "score", "num_tokens", "num_forwards", "num_positions", "num_calls", "num_unfinished",
               "seconds", "num_rounds", "round_ratios")  # fmt: skip
    _COUNTS = ("num_prompts", "num_tokens", "num_forwards", "num_positions", "num_calls", "num_unfinished")
    _LATENCY_BINS = 512

    def __init__(self, warm_up: int = 1) -> None:
        super().__init__()
        self.warm_up = warm_up
        # No state: what this process has still to warm up is neither summed over processes nor kept for a resumed run.
        self._num_to_warm_up = warm_up
        self.add_state("totals", torch.zeros(len(self._FIELDS), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("timed", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_batches", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        # A histogram over log-spaced latencies can be summed over processes; lists of unequal length cannot.
        # First row: batches that warm up; second: the others.
        self.add_state("latencies", torch.zeros(2, self._LATENCY_BINS, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: DecodingOutput, scores: Sequence[float]) -> None:
        """Add one batch.

        Args:
            output: What the engine returned.
            scores: Score of each row, in [0, 1].
        """
        rows = output.rows
        ratios = [ratio for row in rows for ratio in row.round_ratios]
        num_tokens = sum(row.num_tokens for row in rows)
        values = (
            len(rows), sum(scores), num_tokens, sum(row.num_forwards for row in rows),
            sum(row.num_positions for row in rows), output.num_calls,
            sum(row.finish_reason == "unfinished" for row in rows), output.seconds, len(ratios), sum(ratios),
        )  # fmt: skip
        self.totals += torch.tensor(values, dtype=torch.float64, device=self.totals.device)
        is_warm = int(self._num_to_warm_up == 0)
        self._num_to_warm_up = max(self._num_to_warm_up - bool(rows), 0)
        if is_warm:
            self.timed += torch.tensor((num_tokens, output.seconds), dtype=torch.float64, device=self.timed.device)
        self.num_batches += bool(rows)
        for row in rows:
            self.latencies[is_warm, self._bin(row.seconds)] += 1

    def compute(self) -> dict[str, float]:
        """Return the figures by name; zero where nothing was counted."""
        total = dict(zip(self._FIELDS, self.totals.tolist(), strict=True))
        tokens, seconds = self.timed.tolist()
        if seconds == 0:  # too few batches to leave any out
            tokens, seconds = total["num_tokens"], total["seconds"]
        return {
            "score": _ratio(total["score"], total["num_prompts"]),
            "tokens_per_forward": _ratio(total["num_tokens"], total["num_forwards"]),
            "tokens_per_second": _ratio(tokens, seconds),
            "tokens_per_call": _ratio(total["num_tokens"], total["num_calls"]),
            "calls_per_batch": _ratio(total["num_calls"], float(self.num_batches)),
            "positions_per_token": _ratio(total["num_positions"], total["num_tokens"]),
            "paper_tokens_per_forward": _ratio(total["round_ratios"], total["num_rounds"]),
            "latency_median": self._quantile(0.5),
            "latency_p95": self._quantile(0.95),
            **{name: int(total[name]) for name in self._COUNTS},
            "num_batches": int(self.num_batches),
            "seconds": total["seconds"],
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what this process has counted, as JSON values."""
        return {name: getattr(self, name).tolist() for name in self._defaults}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a :meth:`snapshot`; this process is cold and has batches of its own to warm up."""
        self._num_to_warm_up = self.warm_up
        for name, values in snapshot.items():
            state = getattr(self, name)
            setattr(self, name, torch.tensor(values, dtype=state.dtype, device=state.device))

    def reset(self) -> None:
        """Forget what was counted, and warm up anew."""
        super().reset()
        self._num_to_warm_up = self.warm_up

    # Bins run from 10 microseconds to about 28 hours, each 4.6 % wide.
    def _bin(self, seconds: float) -> int:
        return min(max(int(torch.tensor(max(seconds, 1e-5) / 1e-5).log() / 0.045), 0), self._LATENCY_BINS - 1)

    def _quantile(self, q: float) -> float:
        warming, warm = self.latencies
        counts = (warm if warm.any() else warming).cumsum(0)
        if counts[-1] == 0:
            return 0.0
        index = int(torch.searchsorted(counts, q * counts[-1]))
        return 1e-5 * float(torch.tensor((index + 0.5) * 0.045).exp())


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
