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
    """A decoder's score, forward passes, tokens per forward pass and tokens per second over a test set.

    ``docs/metrics.md`` defines every figure exactly.

    * ``score``: mean score of the responses, in [0, 1].
    * ``tokens_per_forward``: committed tokens (EOS token included, later tokens excluded) over the prompts' forward
      passes; a ratio of totals. It depends on the batch size for decoders that weigh forward passes.
    * ``tokens_per_second``: committed tokens over seconds of decoding, measured with a synchronised clock. Prompt
      tokens do not count.
    * ``tokens_per_call``: committed tokens over calls of the model, which grows with the batch size.
    * ``calls_per_batch``: calls of the model over batches of the test set.
    * ``positions_per_token``: computed token positions, padding excluded, over committed tokens.
    * ``latency_median``, ``latency_p95``: seconds from a prompt's first forward pass to its end.
    * ``paper_tokens_per_forward``: mean over rounds of committed tokens per forward pass, which the released program
      prints. For comparison with published figures only.
    * ``peak_cache_bytes``, ``cache_bytes_per_token``: peak memory of the KV cache, and memory per cache entry
      (a token's keys and values in all layers).

    The figures do not depend on the number of processes or on the distribution of prompts. ``seconds`` is the sum over
    processes, so ``tokens_per_second`` is the speed per process.

    Args:
        metrics: Names of the task's further metrics, whose means over all prompts are figures, too.

    Raises:
        ValueError: If a metric has the name of a figure.

    Examples:
        >>> from refusion_lit import load
        >>> from refusion_lit.decoding import ReFusion
        >>> from refusion_lit.types import Prompt, SamplingParams
        >>> model = load("tests/goldens/models/additions-clean")
        >>> prompt = Prompt(token_ids=tuple(model.encode("12+34,56+78>")), id="a")
        >>> metrics = DecodingMetrics()
        >>> metrics.update(model.decode([prompt], ReFusion(), SamplingParams(max_new_tokens=24)), scores=[1.0])
        >>> figures = metrics.compute()
        >>> figures["num_prompts"], figures["score"]
        (1, 1.0)
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
        expected = "names of letters, digits and _, other than the names of a test's figures"
        require(fits, "task.metrics", expected, metrics, "rename them")
        self._metrics = tuple(metrics)

    def update(
        self, output: DecodingOutput, scores: Sequence[float], metrics: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Add a batch.

        Args:
            output: The engine's output.
            scores: Scores by row, in [0, 1].
            metrics: The task's further metrics, by row with a score.
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
        sums = [sum(values.get(name, 0.0) for values in metrics) for name in self._metrics]
        self.metric_totals += self.metric_totals.new_tensor(sums)
        self.peaks = self.peaks.maximum(self.peaks.new_tensor([output.cache_bytes, output.cache_bytes_per_token]))
        latencies = torch.tensor([row.seconds for row in rows], dtype=torch.float64)
        bins = (latencies.clamp(min=_FIRST_BIN) / _FIRST_BIN).log() / _LOG_BIN_WIDTH
        self.latencies += bins.long().clamp(max=_NUM_BINS - 1).bincount(minlength=_NUM_BINS).to(self.latencies)

    def compute(self) -> dict[str, float]:
        """Return the figures by name; zero where nothing was counted."""
        total: dict[str, float] = dict(zip(_TOTALS, self.totals.tolist(), strict=True))

        def ratio(numerator: float, denominator: str) -> float:
            return numerator / total[denominator] if total[denominator] else 0.0

        task_totals = zip(self._metrics, self.metric_totals.tolist(), strict=False)  # none in the constructor
        peak, per_token = self.peaks.tolist()
        return {
            "score": ratio(total["score"], "num_prompts"),
            **{name: ratio(value, "num_prompts") for name, value in task_totals},
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
            snapshot: Counts; an empty mapping starts without counts.

        Raises:
            ValueError: If the counts have other names or shapes.
        """
        self.reset()
        if snapshot:
            states = {name: torch.tensor(values, dtype=torch.float64) for name, values in snapshot.items()}
            shapes = [{name: state.shape for name, state in group.items()} for group in (states, self.state_dict())]
            if shapes[0] != shapes[1]:
                raise ValueError("counts of other metrics")
            self.load_state_dict({name: state.to(self.device) for name, state in states.items()})
        # torchmetrics warns of a metric without updates, but a resumed process may have nothing left to do.
        self.update(DecodingOutput(), [])

    def _latency_quantile(self, q: float) -> float:
        counts = self.latencies.cumsum(0)
        if counts[-1] == 0:
            return 0.0
        index = torch.searchsorted(counts, q * counts[-1])
        return _FIRST_BIN * float(((index + 0.5) * _LOG_BIN_WIDTH).exp())
