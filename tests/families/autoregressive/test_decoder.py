"""``Autoregressive`` against transformers' ``generate``, and its draws against a model of known probabilities."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from refusion_lit import decoding
from refusion_lit.decoding import Autoregressive, ModelMismatchError, check_model, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.kv_cache import KVCache
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.fakes import HashModel, PlainModel

ROOT = Path(__file__).parents[3]
CLEAN = ROOT / "tests" / "goldens" / "models" / "additions-clean"
SMALL_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@cache
def build_model(kind: str) -> Backbone:
    """Return a random model of a type of transformers, or the trained model of the goldens for "trained"."""
    tokenizer = AutoTokenizer.from_pretrained(CLEAN)
    if kind == "trained":
        config = BackboneConfig(source=str(CLEAN), dtype="float64")
    else:
        # Wide weights: with the usual ones a random model repeats one token.
        config = BackboneConfig(config={"model_type": kind, "initializer_range": 0.5, **SMALL_CONFIG}, dtype="float64")
    return config.build(tokenizer, seed=1).eval()


def make_prompts(model: Backbone, lengths: list[int]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    size = model.special_tokens.vocab_size
    ids = [torch.randint(3, size, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(token_ids=tuple(values), id=str(i)) for i, values in enumerate(ids)]


@pytest.mark.parametrize("kind", ["trained", "llama", "qwen2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_decoding_is_what_transformers_generates(kind: str, batch_size: int) -> None:
    model = build_model(kind)
    special = model.special_tokens
    prompts = make_prompts(model, [1, 2, 5, 9, 14, 23])
    if kind == "trained":
        text = AutoTokenizer.from_pretrained(CLEAN)("12+34,50+27=").input_ids
        prompts.append(Prompt(token_ids=tuple(text), id="sum"))
    rows = decode(model, Autoregressive(), prompts, SamplingParams(max_new_tokens=25), batch_size=batch_size).rows
    never = [*special.banned_token_ids, *range(special.vocab_size, model.config.vocab_size)]
    config = GenerationConfig(
        max_new_tokens=25, do_sample=False, eos_token_id=list(special.eos_token_ids), pad_token_id=special.pad_token_id,
        suppress_tokens=never,
    )  # fmt: skip
    for prompt, row in zip(prompts, rows, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert row.token_ids == expected[0, len(prompt.token_ids) :].tolist()
        assert row.num_forwards == len(row.token_ids)
        assert row.num_positions == len(prompt.token_ids) + len(row.token_ids) - 1
        assert row.finish_reason == ("eos" if row.token_ids[-1] in special.eos_token_ids else "length")
    if kind == "trained":
        assert len({row.num_forwards for row in rows}) > 1, "texts of several lengths"


def test_sampling_in_a_batch_gives_the_texts_of_single_prompts_and_depends_on_the_seed() -> None:
    model = build_model("llama")
    prompts = make_prompts(model, [3, 11, 1, 7, 7])
    sampling = SamplingParams(max_new_tokens=12, temperature=1.3, top_p=0.95, seed=4)
    together = decode(model, Autoregressive(), prompts, sampling, batch_size=4).rows
    for prompt, row in zip(reversed(prompts), reversed(together), strict=True):
        [alone] = decode(model, Autoregressive(), [prompt], sampling).rows
        assert row.token_ids == alone.token_ids
        assert row.forward_shapes == alone.forward_shapes
    other = decode(model, Autoregressive(), prompts, replace(sampling, seed=5), batch_size=4).rows
    assert [row.token_ids for row in other] != [row.token_ids for row in together]


class TokenTable(PlainModel):
    """A model whose next token depends only on the token before, with given probabilities (before, next)."""

    def __init__(self, probabilities: Tensor, eos: int) -> None:
        self.table = probabilities.log()
        self.traits = ModelTraits(predictions=("next_token",))
        self.special_tokens = SpecialTokens(
            mask_token_id=None, eos_token_ids=(eos,), pad_token_id=eos, vocab_size=len(probabilities)
        )

    @property
    def device(self) -> torch.device:
        return self.table.device

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, cache=None
    ) -> Tensor:
        return input_ids[..., None].double()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]

    def make_cache(self, num_rows: int) -> KVCache:
        return KVCache(0, num_rows)  # no layers: it keeps no state


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_tokens_have_the_models_distribution(temperature: float) -> None:
    probabilities = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = TokenTable(probabilities / probabilities.sum(-1, keepdim=True), eos=4)
    prompts = [Prompt(token_ids=(2,), id=str(i)) for i in range(1500)]
    sampling = SamplingParams(max_new_tokens=4, temperature=temperature)
    # Comparing the prompts' beginnings would take most of the time.
    rows = decode(model, Autoregressive(), prompts, sampling, batch_size=1500, share_prefixes=False).rows
    counts = torch.zeros(5, 5, dtype=torch.float64)
    for row in rows:
        for before, after in zip([2, *row.token_ids], row.token_ids, strict=False):
            counts[before, after] += 1
        assert 4 not in row.token_ids[:-1]
        assert row.finish_reason == ("eos" if row.token_ids[-1] == 4 else "length")
    assert counts[4].sum() == 0  # nothing follows the end
    expected = (model.table / temperature).softmax(-1) * counts.sum(-1, keepdim=True)
    chi_square = ((counts - expected) ** 2 / expected)[:4].sum(-1)
    assert (chi_square < 23.5).all()  # 4 degrees of freedom: 1 in 10,000


def test_an_eos_token_first_costs_one_forward_pass() -> None:
    table = torch.full((3, 3), 0.1, dtype=torch.float64)
    table[:, 2] = 0.8
    prompt, sampling = Prompt(token_ids=(0, 1), id="0"), SamplingParams(max_new_tokens=9)
    [row] = decode(TokenTable(table, eos=2), Autoregressive(), [prompt], sampling).rows
    assert (row.token_ids, row.num_forwards, row.forward_shapes) == ([2], 1, [(1, 2)])


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (ModelTraits(attention="bidirectional"), "bidirectional"),
        (ModelTraits(attention="block_causal", block_size=4), "block_causal"),
        (ModelTraits(predictions=("mask", "next_token_in_slot")), "next_token"),
    ],
)
def test_models_trained_otherwise_are_refused(traits: ModelTraits, reason: str) -> None:
    model = TokenTable(torch.full((3, 3), 1 / 3), eos=2)
    model.traits = traits
    prompts = [Prompt(token_ids=(0,), id="0")]
    with pytest.raises(ModelMismatchError, match=reason):
        decode(model, Autoregressive(), prompts, SamplingParams())
    with pytest.warns(UserWarning, match=reason):
        output = decode(model, Autoregressive(), prompts, SamplingParams(max_new_tokens=2), allow_mismatch=True)
    assert len(output.mismatches) == 1


@pytest.mark.parametrize("name", ["autoregressive", "refusion", "recompute_kv"])
def test_the_shipped_file_makes_the_decoder(name: str) -> None:
    values = yaml.safe_load((ROOT / "configs" / "decoder" / f"{name}.yaml").read_text(encoding="utf-8"))
    decoder = getattr(decoding, values["class_path"])(**values.get("init_args", {}))
    assert type(decoder).__name__.lower() == name.replace("_", "")


def test_the_trace_names_the_forward_pass_of_the_prompt_prefill() -> None:
    prompt, sampling = Prompt(token_ids=(5, 6, 7), id="0"), SamplingParams(max_new_tokens=3)
    model = HashModel(1, ends=frozenset(), end_bias=-99.0, traits=ModelTraits(predictions=("next_token",)))
    [row] = decode(model, Autoregressive(), [prompt], sampling, trace=True).rows
    assert [entry.phase for entry in row.trace] == ["prefill", "next_token", "next_token"]


def test_check_model_refuses_a_mismatch_or_warns_with_allow_mismatch() -> None:
    model = HashModel(1, traits=ModelTraits(attention="bidirectional", predictions=("mask",)))
    with pytest.raises(ModelMismatchError, match="causal attention"):
        check_model(model, Autoregressive())
    with pytest.warns(UserWarning, match="causal attention"):
        assert len(check_model(model, Autoregressive(), allow_mismatch=True)) == 2
