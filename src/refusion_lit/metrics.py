"""The figures of decoding, exact over several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

from refusion_lit.decoding import DecodingOutput
from refusion_lit.utils.require import require

_COUNTS = ("num_prompts", "num_tokens", "num_forwards", "num_positions", "num_calls", "num_unfinished", "num_batches")
_TOTALS = (*_COUNTS, "score", "seconds", "num_rounds", "round_ratios")
_NUM_BINS = 512
_FIRST_BIN = 1e-5  # seconds
_LOG_BIN_WIDTH = 0.045  # each bin is 4.6 % wide; the last one ends at about 28 hours


class DecodingMetrics(Metric):
    """Score, forwards, tokens per forward and tokens per second of one decoder over a test set.

    ``docs/metrics.md`` defines every figure exactly.

    * ``score``: mean score of the responses, in [0, 1].
    * ``tokens_per_forward``: committed tokens (EOS token counted, nothing after it) over the forwards in
      which each prompt took part; a ratio of totals. Where decoders weigh forwards it depends on the batch size.
    * ``tokens_per_second``: committed tokens over seconds of decoding, measured with a synchronised clock. Prompt
      tokens do not count.
    * ``tokens_per_call``: committed tokens over calls of the model, which does grow with the batch size.
    * ``calls_per_batch``: calls of the model over batches of the test set.
    * ``positions_per_token``: computed token positions, padding excluded, over committed tokens.
    * ``latency_median``, ``latency_p95``: seconds from a prompt's first forward to its end.
    * ``paper_tokens_per_forward``: mean over rounds of committed tokens per forward, the figure that the released
      program prints. For comparison with published figures only.

    * ``peak_cache_bytes``, ``cache_bytes_per_token``: peak memory of the KV cache, and of one entry of one row
      (the keys and values of a token in all layers).

    Several processes get the figures of one process over all prompts, however the prompts are distributed. ``seconds``
    are those of all processes together, so ``tokens_per_second`` is that of one process.

    Args:
        metrics: Names of the task's further metrics, whose means over all prompts are figures, too.

    Raises:
        ValueError: If the name of a metric is that of a figure.
    """

    full_state_update = False
    totals: Float[Tensor, " total"]
    metric_totals: Float[Tensor, " metric"]
    peaks: Float[Tensor, " peak"]
    latencies: Float[Tensor, " bin"]

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        super().__init__()
        self._metrics: tuple[str, ...] = ()
        # Histograms over log-spaced latencies can be summed over processes; lists of unequal length cannot.
        sizes = {"totals": len(_TOTALS), "metric_totals": len(metrics), "latencies": _NUM_BINS, "peaks": 2}
        for name, size in sizes.items():
            zeros = torch.zeros(size, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="max" if name == "peaks" else "sum", persistent=True)
        figures = type(self).compute(self)  # without torchmetrics' wrapper, which warns of a metric without updates
        fits = not isinstance(metrics, str) and all(name.isidentifier() and name not in figures for name in metrics)
        expected = "names of letters, digits and _, other than those of a test's figures"
        require(fits, "task.metrics", expected, metrics, "rename them")
        self._metrics = tuple(metrics)

    def update(
        self, output: DecodingOutput, scores: Sequence[float], metrics: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Add one batch.

        Args:
            output: What the engine returned.
            scores: Score of each row, in [0, 1].
            metrics: The task's further metrics of each row that has a score.
        """
        rows = output.rows
        added: dict[str, float] = {
            "num_prompts": len(rows),
            "num_tokens": sum(row.num_tokens for row in rows),
            "num_forwards": sum(row.num_forwards for row in rows),
            "num_positions": sum(row.num_positions for row in rows),
            "num_calls": output.num_calls,
            "num_unfinished": sum(row.finish_reason == "unfinished" for row in rows),
            "num_batches": bool(rows),
            "score": sum(scores),
            "seconds": output.seconds,
            "num_rounds": sum(len(row.round_ratios) for row in rows),
            "round_ratios": sum(sum(row.round_ratios) for row in rows),
        }
        self.totals += self.totals.new_tensor([added[name] for name in _TOTALS])
        own = [sum(each.get(name, 0.0) for each in metrics) for name in self._metrics]
        self.metric_totals += self.metric_totals.new_tensor(own)
        self.peaks = self.peaks.maximum(self.peaks.new_tensor([output.cache_bytes, output.cache_bytes_per_token]))
        latencies = torch.tensor([row.seconds for row in rows], dtype=torch.float64)
        bins = (latencies.clamp(min=_FIRST_BIN) / _FIRST_BIN).log() / _LOG_BIN_WIDTH
        self.latencies += bins.long().clamp(max=_NUM_BINS - 1).bincount(minlength=_NUM_BINS).to(self.latencies)

    def compute(self) -> dict[str, float]:
        """Return the figures by name; zero where nothing was counted."""
        total: dict[str, float] = dict(zip(_TOTALS, self.totals.tolist(), strict=True))

        def ratio(numerator: float, denominator: str) -> float:
            return numerator / total[denominator] if total[denominator] else 0.0

        own = zip(self._metrics, self.metric_totals.tolist(), strict=False)  # none in the constructor
        peak, per_token = self.peaks.tolist()
        return {
            "score": ratio(total["score"], "num_prompts"),
            **{name: ratio(value, "num_prompts") for name, value in own},
            "tokens_per_forward": ratio(total["num_tokens"], "num_forwards"),
            "tokens_per_second": ratio(total["num_tokens"], "seconds"),
            "tokens_per_call": ratio(total["num_tokens"], "num_calls"),
            "calls_per_batch": ratio(total["num_calls"], "num_batches"),
            "positions_per_token": ratio(total["num_positions"], "num_tokens"),
            "paper_tokens_per_forward": ratio(total["round_ratios"], "num_rounds"),
            "latency_median": self._latency_quantile(0.5),
            "latency_p95": self._latency_quantile(0.95),
            **{name: int(total[name]) for name in _COUNTS},
            "seconds": total["seconds"],
            "peak_cache_bytes": int(peak),
            "cache_bytes_per_token": per_token,
        }

    def snapshot(self) -> dict[str, Any]:
        """Return this process's counts as JSON values."""
        return {name: state.tolist() for name, state in self.state_dict().items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a :meth:`snapshot`.

        Args:
            snapshot: May be empty, for a start without any counts.
        """
        self.reset()
        if snapshot:
            states = {name: torch.tensor(values, dtype=torch.float64) for name, values in snapshot.items()}
            self.load_state_dict({name: state.to(self.device) for name, state in states.items()})
        # torchmetrics warns of a metric without updates, but a resumed process may have nothing left to do.
        self.update(DecodingOutput(), [])

    def _latency_quantile(self, q: float) -> float:
        counts = self.latencies.cumsum(0)
        if counts[-1] == 0:
            return 0.0
        index = torch.searchsorted(counts, q * counts[-1])
        return _FIRST_BIN * float(((index + 0.5) * _LOG_BIN_WIDTH).exp())
