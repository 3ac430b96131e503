"""Metrics: loss means and decoding figures, exact over several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

from refusion_lit.decoding import DecodingOutput
from refusion_lit.learning.batch import LossOutput
from refusion_lit.learning.drafts import NUM_OFFSETS, draft_figures
from refusion_lit.utils.require import require

_NUM_BINS = 512
_FIRST_BIN = 1e-5  # seconds
_LOG_BIN_WIDTH = 0.045  # each bin is 4.6 % wide; the last one ends at about 28 hours


class TermMeans(Metric):
    """Mean of every term of a loss: the total of the sums over the total of the counts, not a mean of batch means.

    Several processes get the means of one process over all samples, however the samples are distributed.

    Args:
        terms: Coefficient of each term in ``total``, by the term's name, as in :attr:`LossOutput.terms`.
    """

    full_state_update = False
    sums: Float[Tensor, " term"]
    counts: Float[Tensor, " term"]
    draft_counts: Float[Tensor, "offset figure"]

    def __init__(self, terms: Mapping[str, float]) -> None:
        super().__init__()
        self.terms = dict(terms)
        for name in ("sums", "counts"):
            self.add_state(name, torch.zeros(len(self.terms), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("draft_counts", torch.zeros(NUM_OFFSETS, 4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: LossOutput | None) -> None:
        """Add a batch; ``None`` on a process that has no sample in it."""
        if loss is not None:
            self.sums += loss.sums.detach()
            self.counts += loss.counts.detach()
            if loss.draft_counts is not None:
                self.draft_counts += loss.draft_counts

    def compute(self) -> dict[str, Tensor]:
        """Return the mean of every term and their weighted ``total``, in nats; zero for a term without targets.

        With objectives that train slots, also the figures of :func:`~refusion_lit.learning.drafts.draft_figures`.
        """
        loss = LossOutput(sums=self.sums, counts=self.counts, terms=self.terms)
        drafts = draft_figures(self.draft_counts) if self.draft_counts.any() else {}
        return {**loss.named_means(), **drafts, "total": loss.total}


class DecodingMetrics(Metric):
    """Score, forwards, tokens per forward and tokens per second of one decoder over a test set.

    ``docs/metrics.md`` defines every figure exactly.

    * ``score``: mean score of the responses, in [0, 1].
    * ``tokens_per_forward``: committed tokens (EOS token counted, nothing after it) over the forwards in
      which each prompt took part; a ratio of totals that does not depend on the batch size.
    * ``tokens_per_second``: committed tokens over seconds of decoding, measured with a synchronised clock. Prompt
      tokens do not count.
    * ``tokens_per_call``: committed tokens over calls of the model, which does grow with the batch size.
    * ``calls_per_batch``: calls of the model over batches of the test set.
    * ``positions_per_token``: computed token positions, padding excluded, over committed tokens.
    * ``latency_median``, ``latency_p95``: seconds from a prompt's first forward to its end.
    * ``paper_tokens_per_forward``: mean over rounds of committed tokens per forward, the figure that the released
      program prints. For comparison with published figures only.

    * ``peak_cache_bytes``, ``cache_bytes_per_token``: peak memory of the key/value cache, and of one entry of one row
      (the keys and values of a token in all layers).

    Several processes get the figures of one process over all prompts, however the prompts are distributed. ``seconds``
    are those of all processes together, so ``tokens_per_second`` is that of one process.

    Args:
        metrics: Names of the task's further metrics, whose means over all prompts are figures, too.

    Raises:
        ValueError: If the name of a metric is that of a figure.
    """

    full_state_update = False
    num_prompts: Float[Tensor, ""]
    score_sum: Float[Tensor, ""]
    num_tokens: Float[Tensor, ""]
    num_forwards: Float[Tensor, ""]
    num_positions: Float[Tensor, ""]
    num_calls: Float[Tensor, ""]
    num_unfinished: Float[Tensor, ""]
    num_batches: Float[Tensor, ""]
    seconds: Float[Tensor, ""]
    num_rounds: Float[Tensor, ""]
    peak_cache_bytes: Float[Tensor, ""]
    cache_bytes_per_token: Float[Tensor, ""]
    round_ratio_sum: Float[Tensor, ""]
    latencies: Float[Tensor, " bin"]

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        super().__init__()
        self._metrics: tuple[str, ...] = ()
        for name in (
            "num_prompts", "score_sum", "num_tokens", "num_forwards", "num_positions", "num_calls", "num_unfinished",
            "num_batches", "seconds", "num_rounds", "round_ratio_sum",
        ):  # fmt: skip
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum", persistent=True)
        for name in ("peak_cache_bytes", "cache_bytes_per_token"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="max", persistent=True)
        # Histograms over log-spaced latencies can be summed over processes; lists of unequal length cannot.
        bins = torch.zeros(_NUM_BINS, dtype=torch.float64)
        self.add_state("latencies", bins, dist_reduce_fx="sum", persistent=True)
        figures = type(self).compute(self)  # without torchmetrics' wrapper, which warns of a metric without updates
        fits = not isinstance(metrics, str) and all(name.isidentifier() and name not in figures for name in metrics)
        expected = "names of letters, digits and _ that are none of a test's figures"
        require(fits, "task.metrics", expected, metrics, "rename them")
        self._metrics = tuple(metrics)
        for name in self._metrics:
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(f"metric_{name}", zero, dist_reduce_fx="sum", persistent=True)

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
        self.num_prompts += len(rows)
        self.score_sum += sum(scores)
        for name in self._metrics:
            total = getattr(self, f"metric_{name}")
            total += sum(each.get(name, 0.0) for each in metrics)
        self.num_tokens += sum(row.num_tokens for row in rows)
        self.num_forwards += sum(row.num_forwards for row in rows)
        self.num_positions += sum(row.num_positions for row in rows)
        self.num_calls += output.num_calls
        self.num_unfinished += sum(row.finish_reason == "unfinished" for row in rows)
        self.num_batches += bool(rows)
        self.seconds += output.seconds
        self.peak_cache_bytes = self.peak_cache_bytes.clamp(min=output.cache_bytes)
        self.cache_bytes_per_token = self.cache_bytes_per_token.clamp(min=output.cache_bytes_per_token)
        self.num_rounds += sum(len(row.round_ratios) for row in rows)
        self.round_ratio_sum += sum(sum(row.round_ratios) for row in rows)
        latencies = torch.tensor([row.seconds for row in rows], dtype=torch.float64)
        bins = (latencies.clamp(min=_FIRST_BIN) / _FIRST_BIN).log() / _LOG_BIN_WIDTH
        self.latencies += bins.long().clamp(max=_NUM_BINS - 1).bincount(minlength=_NUM_BINS).to(self.latencies)

    def compute(self) -> dict[str, float]:
        """Return the figures by name; zero where nothing was counted."""
        counts = ("num_prompts", "num_tokens", "num_forwards", "num_positions", "num_calls", "num_unfinished")
        return {
            "score": _ratio(self.score_sum, self.num_prompts),
            **{name: _ratio(getattr(self, f"metric_{name}"), self.num_prompts) for name in self._metrics},
            "tokens_per_forward": _ratio(self.num_tokens, self.num_forwards),
            "tokens_per_second": _ratio(self.num_tokens, self.seconds),
            "tokens_per_call": _ratio(self.num_tokens, self.num_calls),
            "calls_per_batch": _ratio(self.num_calls, self.num_batches),
            "positions_per_token": _ratio(self.num_positions, self.num_tokens),
            "paper_tokens_per_forward": _ratio(self.round_ratio_sum, self.num_rounds),
            "latency_median": self._latency_quantile(0.5),
            "latency_p95": self._latency_quantile(0.95),
            **{name: int(getattr(self, name)) for name in (*counts, "num_batches")},
            "seconds": float(self.seconds),
            "peak_cache_bytes": int(self.peak_cache_bytes),
            "cache_bytes_per_token": float(self.cache_bytes_per_token),
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
        self.update(DecodingOutput(rows=[], num_calls=0, num_positions=0, seconds=0.0), [])

    def _latency_quantile(self, q: float) -> float:
        counts = self.latencies.cumsum(0)
        if counts[-1] == 0:
            return 0.0
        index = torch.searchsorted(counts, q * counts[-1])
        return _FIRST_BIN * float(((index + 0.5) * _LOG_BIN_WIDTH).exp())


def _ratio(numerator: Tensor, denominator: Tensor) -> float:
    return float(numerator / denominator) if denominator else 0.0
