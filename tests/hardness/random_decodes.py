"""Random decodes of models with adversarial logits, checked against the contract of every decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from refusion_lit.decoding import Decoder, DecodingOutput, decode
from refusion_lit.types import Prompt, SamplingParams, SpecialTokens
from support import decoder_cases
from support.decoder_cases import LastState, check_output, prompts, setups, traits_for, weighs_rows
from support.fakes import DRAFTS, NUM_EXTRA_ROWS, VOCAB, HashModel, hashed_uniform

ATTACKS = ("none", "nan", "inf", "-inf", "ties", "ends", "no ends", "forbidden", "huge", "one nan", "tiny", "few")
SPECIALS = [
    *decoder_cases.SPECIALS,
    SpecialTokens(
        mask_token_id=0, eos_token_ids=(VOCAB - 1,), pad_token_id=0, vocab_size=VOCAB, draft_token_ids=DRAFTS
    ),
]
TEMPERATURES = (0.0, 0.0, 1e-30, 1e-6, 0.7, 1.0, 100.0, 1e30)
CALLS_PER_TOKEN = 12
"""More than any decoder needs, even one that plans, verifies, completes and redraws token by token."""


class AdversarialModel(HashModel):
    """A hash model that corrupts each row of logits by an attack; the hash of the row's input selects the attack.

    Args:
        attacks: The attacks to choose from, of :data:`ATTACKS`.
        dtype: Data type of the logits.
        max_calls: More calls than this count as a decode that does not end.
    """

    def __init__(self, attacks: tuple[str, ...], dtype: torch.dtype, max_calls: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.attacks, self.dtype, self.max_calls = attacks, dtype, max_calls

    def record(self, *tensors: Tensor) -> None:
        super().record(*tensors)
        assert len(self.calls) <= self.max_calls, "the decode does not end"

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden).to(self.dtype)
        chosen = (hashed_uniform(hidden[:, 0] + 5, 1)[:, 0] * len(self.attacks)).long().tolist()
        for row, index in zip(logits, chosen, strict=True):
            self.attack_row(row, self.attacks[index])
        return logits

    def attack_row(self, row: Tensor, attack: str) -> None:
        ends, limits = list(self.special_tokens.eos_token_ids), torch.finfo(self.dtype)
        forbidden = [*self.special_tokens.banned_token_ids, *range(self.special_tokens.vocab_size, len(row))]
        if attack in ("nan", "inf", "-inf"):
            row[:] = float(attack)
        elif attack == "ties":
            row[:] = row[0].item()
        elif attack == "ends":
            row[ends] = torch.inf
        elif attack == "no ends":
            row[ends] = torch.nan
        elif attack == "forbidden":  # only ids that must never be drawn have a chance
            row[:] = -torch.inf
            row[forbidden] = torch.inf
        elif attack == "huge":
            is_high = row > row.median()
            row[is_high], row[~is_high] = limits.max, limits.min
        elif attack == "one nan":
            row[int(row.argmax())] = torch.nan
        elif attack == "tiny":
            row *= limits.tiny
        elif attack == "few":
            row[row < row.max()] = -torch.inf


@dataclass
class Counts:
    """Totals over decodes."""

    decodes: int = 0
    prompts: int = 0
    tokens: int = 0
    forwards: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def add(self, output: DecodingOutput) -> None:
        self.decodes += 1
        self.prompts += len(output.rows)
        self.tokens += sum(row.num_tokens for row in output.rows)
        self.forwards += output.num_calls
        for row in output.rows:
            self.finish_reasons[row.finish_reason] = self.finish_reasons.get(row.finish_reason, 0) + 1


@st.composite
def models(draw: st.DrawFn) -> Callable[[Decoder, int], AdversarialModel]:
    """Draw a factory of models, which takes the decoder and the maximum number of calls."""
    attacks = tuple(draw(st.lists(st.sampled_from(ATTACKS), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    options = {
        "seed": draw(st.integers(0, 10**6)),
        "flavour": draw(st.sampled_from(["plain", "ties", "extreme", "banned"])),
        "ends": draw(st.frozensets(st.integers(0, 40), max_size=3)),
        "end_bias": draw(st.sampled_from([-30.0, -4.0, 0.0, 6.0, 60.0])),
        "special": draw(st.sampled_from(SPECIALS)),
    }
    return lambda decoder, max_calls: AdversarialModel(attacks, dtype, max_calls, traits=traits_for(decoder), **options)


def detokenize(token_ids: list[int], **_: object) -> str:
    """Map every id to a letter."""
    return "".join(chr(97 + token) for token in token_ids)


@st.composite
def samplings(draw: st.DrawFn, sampling: SamplingParams) -> SamplingParams:
    """Draw sampling parameters with a given number of tokens."""
    return replace(
        sampling,
        temperature=draw(st.sampled_from(TEMPERATURES)),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-12])),
        top_k=draw(st.sampled_from([None, None, 1, 3, VOCAB + NUM_EXTRA_ROWS, 1000])),
        seed=draw(st.integers(-5, 2**70)),
        stop=tuple(draw(st.sampled_from([[], [], [], ["d"], ["ef", "g"], ["\0"]]))),
    )


def check_stops(drawn_prompts: list[Prompt], sampling: SamplingParams, output: DecodingOutput) -> None:
    """Check rows with stop strings: a row contains one only if its last token completes it."""
    for prompt, row in zip(drawn_prompts, output.rows, strict=True):
        assert row.id == prompt.id
        assert 1 <= row.num_tokens <= sampling.max_new_tokens
        text = detokenize(row.token_ids)
        assert (row.finish_reason == "stop") == any(stop in text for stop in sampling.stop)
        assert not any(stop in text[:-1] for stop in sampling.stop)


def random_decodes(cls: type[Decoder], *, num: int, seed: int, shrink: bool = False) -> Counts:
    """Run random decodes with a decoder and check each; only a failed check raises.

    Args:
        cls: The decoder.
        num: Number of decodes, each of one to five prompts.
        seed: Random seed.
        shrink: Whether to search for the simplest failing decode, which takes minutes.
    """
    counts = Counts()

    @hypothesis.seed(seed)
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data(), make=models(), drawn_prompts=prompts())
    def one(data: st.DataObject, make: Callable[[Decoder, int], AdversarialModel], drawn_prompts: list[Prompt]) -> None:
        decoder, sampling = data.draw(setups(cls))
        sampling = data.draw(samplings(sampling))
        budget = data.draw(st.none() | st.integers(1, 60))
        size = data.draw(st.integers(1, 4))
        # Canvases are rounded up to whole blocks or slots, and schedules may have steps that commit nothing.
        max_calls = CALLS_PER_TOKEN * (sampling.max_new_tokens + 64) * len(drawn_prompts)
        model, watcher = make(decoder, max_calls), LastState()
        output = decode(
            model, decoder, drawn_prompts, sampling, batch_size=size, max_tokens_per_forward=budget,
            callbacks=[watcher], detokenize=detokenize, trace=True,
        )  # fmt: skip
        counts.add(output)
        if sampling.stop:
            check_stops(drawn_prompts, sampling, output)
        else:
            check_output(model, drawn_prompts, sampling, output, watcher)
        for row in output.rows:
            values = [value for entry in row.trace for value in (*entry.probabilities, *entry.scores)]
            assert all(0 <= value <= 1 + 1e-3 for value in values), "a probability is out of range"
        index = data.draw(st.integers(0, len(drawn_prompts) - 1))
        other = make(decoder, max_calls)
        [alone] = decode(other, decoder, [drawn_prompts[index]], sampling, detokenize=detokenize).rows
        assert alone.token_ids == output.rows[index].token_ids
        assert weighs_rows(decoder) or alone.forward_shapes == output.rows[index].forward_shapes

    with contextlib.redirect_stdout(None):  # the exception's notes have hypothesis's report
        one()
    return counts
