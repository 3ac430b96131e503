"""The backbone around models of transformers: masks and positions, other architectures, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from refusion_lit.decoding import Autoregressive, ReFusion, decode
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.transformers_forward import library_mask
from refusion_lit.modeling.visibility import Span, Visibility
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from support.fakes import SPECIAL, VOCAB, tiny_backbone

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.5,
}
# Norms and rotary angles are computed in float32 even in a float64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SOFTCAPS: dict[str, Any] = {
    "attn_implementation": "eager",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 40,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
GRANITE: dict[str, Any] = {
    "logits_scaling": 4.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
MIXTURE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LLAMA4: dict[str, Any] = {
    "num_local_experts": 2,
    "intermediate_size_mlp": 24,
    "layer_types": ["full_attention", "full_attention"],
    "floor_scale": 4,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 24}


def build_library_model(model_type: str, dtype: torch.dtype = torch.float64, **options: Any) -> PreTrainedModel:
    """Return a tiny random model of transformers; options of the config replace ``SMALL``."""
    values = {**SMALL, **options}
    if model_type == "gpt2":
        values = {key: SMALL[key] for key in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")} | GPT2
    implementation = values.pop("attn_implementation", "sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = AutoConfig.for_model(model_type, **values)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation).eval()


def build_backbone(model_type: str = "qwen3", dtype: torch.dtype = torch.float64, **options: Any) -> Backbone:
    return Backbone(build_library_model(model_type, dtype, **options), ModelTraits(), SPECIAL)


def draw_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def shuffled_positions(rows: int, length: int) -> Tensor:
    """Return the positions of slots of 3 in any order, as in training: neighbours differ by other than 1."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(length).view(-1, 3)
    return torch.stack([slots[torch.randperm(len(slots), generator=generator)].flatten() for _ in range(rows)])


def make_causal_mask(rows: int, length: int) -> Tensor:
    return torch.ones(rows, length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", ["eval", "train", "checkpointing"])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # its new name is unknown to older releases
def test_positions_out_of_order_are_no_packed_sequences(rows: int, mode: str) -> None:
    """Without a mask transformers reads a position that does not follow the last as the start of another sequence."""
    model = build_backbone()
    model.train(mode != "eval")
    if mode == "checkpointing":
        model.model.gradient_checkpointing_enable()
    ids, positions = draw_tokens(rows, 12), shuffled_positions(rows, 12)
    expected = model.hidden_states(ids, positions, make_causal_mask(rows, 12))
    torch.testing.assert_close(model.hidden_states(ids, positions, None), expected)
    torch.testing.assert_close(model(ids, positions), expected)


def test_transformers_takes_positions_out_of_order_for_packed_sequences() -> None:
    """If this fails, transformers has changed, and the backbone's mask of ones may be needed no longer."""
    model = build_backbone()
    ids, positions = draw_tokens(2, 12), shuffled_positions(2, 12)
    right = model.hidden_states(ids, positions, None)
    wrong = model.body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    assert (right - wrong).abs().max() > 0.1


def test_padding_on_the_right_changes_nothing() -> None:
    model = build_backbone()
    ids, positions = draw_tokens(1, 9), shuffled_positions(1, 9)
    alone = model.hidden_states(ids, positions, None)
    padded = model.hidden_states(
        torch.nn.functional.pad(ids, (0, 4)), torch.nn.functional.pad(positions, (0, 4)), None
    )  # fmt: skip
    torch.testing.assert_close(padded[:, :9], alone)


def compute_each_query(model: Backbone, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Return hidden states of a model of one layer without using the mask in attention.

    For each query, a forward pass gets only the tokens that the query sees, with the query last. With one layer, the
    output depends on nothing else.
    """
    rows = []
    for row in range(len(ids)):
        outputs = []
        for query in range(ids.shape[1]):
            others = [key for key in mask[row, query].nonzero().flatten().tolist() if key != query]
            order = torch.tensor([*others, query])
            hidden = model.hidden_states(ids[row, order][None], positions[row, order][None], None)
            outputs.append(hidden[0, -1])
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@settings(max_examples=15)
@given(
    model_type=st.sampled_from(["qwen3", "gemma2"]), seed=st.integers(0, 999), rows=st.integers(1, 2),
    length=st.integers(1, 7),
)  # fmt: skip
def test_queries_see_exactly_what_the_mask_allows(model_type: str, seed: int, rows: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = draw_tokens(rows, length, seed)
    positions = torch.stack([torch.randperm(length, generator=generator) for _ in range(rows)])
    mask = (torch.rand(rows, length, length, generator=generator) < 0.5) | torch.eye(length, dtype=torch.bool)
    options = SOFTCAPS if model_type == "gemma2" else {}
    one_layer = build_backbone(model_type, num_hidden_layers=1, **options)
    with torch.no_grad():
        expected = compute_each_query(one_layer, ids, positions, mask)
        torch.testing.assert_close(one_layer.hidden_states(ids, positions, mask), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model_type", "options", "fused_body"), [("qwen3", {}, True), ("qwen3", {}, False), ("gemma2", SOFTCAPS, False)]
)
def test_attention_implementations_agree(model_type: str, options: dict[str, Any], fused_body: bool) -> None:
    ids, positions = draw_tokens(2, 9), shuffled_positions(2, 9)
    # A random half of the keys, and the query's own.
    mask = (torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(9, dtype=torch.bool)
    reference = build_backbone(model_type, torch.float32, **options)
    other = build_backbone(model_type, torch.float32, **{**options, "attn_implementation": "flex_attention"})
    other.fused_body = fused_body
    assert (other.make_fused_body() is not None) == fused_body
    # Compiling flex attention takes 20 s on a CPU; its own program without it shows the same masks.
    torch.compiler.set_stance("force_eager")
    try:
        with torch.no_grad():
            for allowed in (mask, make_causal_mask(2, 9), None):
                torch.testing.assert_close(
                    other.hidden_states(ids, positions, allowed), reference.hidden_states(ids, positions, allowed),
                    rtol=1e-4, atol=1e-4,
                )  # fmt: skip
            ragged = [ids[0, :4].tolist(), ids[1].tolist(), ids[0].tolist(), ids[1, 3:].tolist()]
            prompts = [Prompt(token_ids=tuple(row), id=str(i)) for i, row in enumerate(ragged)]
            sampling = SamplingParams(max_new_tokens=6)
            decoder = ReFusion(slot_size=4, slot_threshold=0.2, token_threshold=0.2)
            texts = [
                [row.token_ids for row in decode(model, decoder, prompts, sampling, batch_size=3).rows]
                for model in (reference, other)
            ]
    finally:
        torch.compiler.set_stance("default")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3", {}),
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}),
        ("gemma3_text", {"final_logit_softcapping": None, "sliding_window": 9}),
        ("phi3", {}),
        ("olmo2", {}),
        ("gemma", {}),
        ("gemma2", {**SOFTCAPS, "sliding_window": 9}),
        ("gemma3_text", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 40}),
        ("gemma4_text", GEMMA4),
        ("vaultgemma", SOFTCAPS),
        ("nanochat", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.2}),
        ("cohere2", {"logit_scale": 0.2}),
        ("cohere2_moe", {"logit_scale": 0.2, "num_experts": 4, "num_experts_per_tok": 2}),
        ("granite", GRANITE),
        ("granitemoe", {**GRANITE, **MIXTURE}),
        ("hyperclovax", {"logits_scaling": 0.3}),
        ("minicpm3", LATENT),
        ("gpt_neox", {}),
        ("gpt2", {}),
        ("gptj", {"attn_implementation": "eager", "rotary_dim": 8}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("mixtral", MIXTURE),
        ("deepseek_v3", {**LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}),
        ("gpt_oss", {**MIXTURE, "attn_implementation": "eager"}),
        ("llama4_text", {**LLAMA4, "no_rope_layers": [1, 0], "attn_temperature_tuning": False}),
        ("llama4_text", {**LLAMA4, "no_rope_layers": [1, 1]}),
    ],
)
def test_causal_models_of_many_architectures_give_transformers_logits(model_type: str, options: dict[str, Any]) -> None:
    """The logits agree without a mask, with a causal mask, and in two parts over our KV cache."""
    has_experts = not {"num_experts", "num_local_experts", "n_routed_experts"}.isdisjoint(options)
    dtype = torch.float32 if has_experts else torch.float64  # experts know no float64
    library = build_library_model(model_type, dtype, **options)
    model = Backbone(library, ModelTraits(), SPECIAL)
    close = {"rtol": 1e-4, "atol": 1e-4}
    ids, positions = draw_tokens(2, 9), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        expected = library(input_ids=ids).logits
        for mask in (None, make_causal_mask(2, 9)):
            torch.testing.assert_close(model.logits(model.hidden_states(ids, positions, mask)), expected, **close)
        cache = model.make_cache(2)
        for start, stop in ((0, 5), (5, 9)):
            num_tokens = stop - start
            cache.prepare(
                rows=[0, 1],
                num_keys=stop,
                source_index=torch.arange(2 * num_tokens),
                row_index=torch.arange(2).repeat_interleave(num_tokens),
                cache_index=torch.arange(start, stop).repeat(2),
            )
            hidden = model.hidden_states(
                ids[:, start:stop], positions[:, start:stop], make_causal_mask(2, 9)[:, start:stop, :stop], cache
            )
            torch.testing.assert_close(model.logits(hidden), expected[:, start:stop], **close)
    assert (model.head.weight.dtype, model.device.type) == (dtype, "cpu")


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("qwen3", {"logits_scaling": 8.0}, r"logits_scaling=8.0"),
        ("llama4_text", {**LLAMA4, "no_rope_layers": [1, 0]}, "place in the KV cache"),
        ("mamba", {"attn_implementation": "eager"}, "takes no position ids"),
        ("bloom", {"n_head": 2, "n_layer": 1, "attn_implementation": "eager"}, "takes no position ids"),
        ("openai-gpt", {"attn_implementation": "eager"}, "takes no past key values"),
        ("bert", {}, r"layers besides body and linear head \(cls\)"),
        (
            "modernbert-decoder",
            {"bos_token_id": 1, "layer_types": ["full_attention"] * 2},
            r"layers besides .* \(lm_head\)",
        ),
        ("gpt_neox_japanese", {"attn_implementation": "eager"}, "keys"),
        ("gpt_neo", {"attention_types": [[["global"], 2]], "attn_implementation": "eager"}, "place.* in the KV cache"),
    ],
)
def test_models_that_would_be_changed_silently_are_refused(
    model_type: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^backbone: .*{reason}"):
        build_backbone(model_type, dtype=torch.float32, **options)


def test_biases_by_places_in_the_cache_are_refused() -> None:
    library = build_library_model("qwen3")
    library.config.alibi = True
    with pytest.raises(ValueError, match=r"^backbone: .*alibi"):
        Backbone(library, ModelTraits(), SPECIAL)


def test_unknown_layer_types_are_refused() -> None:
    library = build_library_model("qwen3")
    library.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match=r"^backbone: .*layers of type chunked_attention"):
        Backbone(library, ModelTraits(), SPECIAL)


SLIDING = [  # architectures with a sliding window, and options
    ("mistral", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("gemma2", SOFTCAPS),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
    ("gemma4_text", GEMMA4),
    ("cohere2", {"num_hidden_layers": 4}),
    ("granite_swa", {**GRANITE, "attn_implementation": "eager"}),
    ("gpt_oss", {**MIXTURE, "attn_implementation": "eager", "experts_implementation": "eager"}),
    ("llama", {}),  # ignores the window
]


@pytest.mark.parametrize(("model_type", "options"), SLIDING)
@pytest.mark.parametrize("num_windows", [1.5, 4])
def test_a_text_beyond_the_sliding_window_is_transformers_text(
    model_type: str, options: dict[str, Any], num_windows: float
) -> None:
    """Logits agree with transformers; so do greedy texts in a batch; and sharing prefixes changes no text."""
    library = build_library_model(model_type, torch.float64, sliding_window=8, **options)
    model = Backbone(library, ModelTraits(predictions=("next_token",)), SPECIAL)
    length = int(8 * num_windows)
    ids, positions = draw_tokens(2, length), torch.arange(length).expand(2, length)
    with torch.no_grad():
        expected = library(input_ids=ids).logits
        actual = model.logits(model.hidden_states(ids, positions, None))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        spans = [Span(row, 0, length, 0) for row in range(2)]
        actual = model.logits(model.hidden_states(ids, positions, Visibility(spans, (2, length), length)))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    prompts = [Prompt(token_ids=tuple(row.tolist()), id=str(i)) for i, row in enumerate(ids)]
    prompts.append(Prompt(token_ids=(3, 4), id="short"))
    rows = decode(model, Autoregressive(), prompts, SamplingParams(max_new_tokens=20), batch_size=3).rows
    for prompt, row in zip(prompts, rows, strict=True):
        assert choose_greedily(library, prompt.token_ids, row.token_ids) == row.token_ids
    equal_prompts = [Prompt(token_ids=(3, 4, 5) * 30, id=str(i)) for i in range(3)]
    sampling = SamplingParams(max_new_tokens=9)
    output = decode(model, Autoregressive(), equal_prompts, sampling, batch_size=2)
    assert output.num_shared > 0
    [alone] = decode(model, Autoregressive(), equal_prompts[:1], sampling, share_prefixes=False).rows
    assert all(row.token_ids == alone.token_ids for row in output.rows)


def choose_greedily(library: Any, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
    """Return the most probable allowed token before every token of a response, by one forward pass of transformers."""
    with torch.no_grad():
        logits = library(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logits[:, [*SPECIAL.banned_token_ids, *range(SPECIAL.vocab_size, logits.shape[1])]] = -torch.inf
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize(("model_type", "options"), SLIDING)
def test_batches_and_shared_prefixes_keep_texts_beyond_the_window(model_type: str, options: dict[str, Any]) -> None:
    """Long and short texts share a small cache and prefixes; rows of finished texts are used again.

    The window has 8 tokens, and the shared prefix 75.
    """
    model = Backbone(
        build_library_model(model_type, torch.float64, sliding_window=8, **options),
        ModelTraits(predictions=("next_token",)),
        replace(SPECIAL, eos_token_ids=(1, 5, 9)),  # more ends, so that texts finish at different times
    )
    start = (3, 4, 6) * 25
    ends = [(3,), (4, 6), (7,) * 9, (3, 8), (), (10, 11)]
    prompts = [Prompt(token_ids=(*start, *end), id=str(i)) for i, end in enumerate(ends)]
    prompts += [Prompt(token_ids=(i, 4), id=f"short {i}") for i in (3, 6, 7)]
    sampling = SamplingParams(max_new_tokens=40)
    batched = decode(model, Autoregressive(), prompts, sampling, batch_size=3, max_cache_tokens=300)
    assert batched.num_shared > 0
    [alone] = decode(model, Autoregressive(), prompts[2:3], sampling, share_prefixes=False).rows
    assert batched.rows[2].token_ids == alone.token_ids
    for prompt, row in zip(prompts, batched.rows, strict=True):
        assert choose_greedily(model.model, prompt.token_ids, row.token_ids) == row.token_ids


def test_a_text_out_of_order_beyond_the_sliding_window_is_refused() -> None:
    model = Backbone(build_library_model("mistral", torch.float64, sliding_window=8), ModelTraits(), SPECIAL)
    ids, positions = draw_tokens(2, 12), torch.arange(12).expand(2, 12)
    with pytest.raises(ValueError, match=r"^context: .*8 tokens.*got 12"):
        model.hidden_states(ids, positions, make_causal_mask(2, 12))
    prompt, sampling = Prompt(token_ids=(3, 4), id="p"), SamplingParams(max_new_tokens=7)
    with pytest.raises(ValueError, match=r"^prompt p: expected at most 1 tokens"):
        decode(model, ReFusion(), [prompt], sampling)


def test_heads_that_are_not_linear_are_refused() -> None:
    library = build_library_model("qwen3")
    library.lm_head = torch.nn.Sequential(torch.nn.Linear(32, VOCAB))
    with pytest.raises(ValueError, match=r"^backbone: Qwen3ForCausalLM .*Sequential"):
        Backbone(library, ModelTraits(), SPECIAL)


def test_an_unknown_attention_takes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_backbone()
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert model.config._attn_implementation == "flash_attention_2"
    ids, positions = draw_tokens(2, 6), shuffled_positions(2, 6)
    with pytest.raises(ValueError, match=r"^attn_implementation: 'flash_attention_2'"):
        model.hidden_states(ids, positions, make_causal_mask(2, 6))
    # The library takes a single row out of order for packed sequences unless it gets a mask.
    assert library_mask(model.body, None, positions, 4).all()


def test_hidden_states_carry_gradients_and_logits_are_the_head_alone() -> None:
    model = build_backbone()
    hidden = model(draw_tokens(2, 6), shuffled_positions(2, 6), make_causal_mask(2, 6))
    assert hidden.shape == (2, 6, 32)
    logits = model.logits(hidden[1, 3:5])
    torch.testing.assert_close(logits, hidden[1, 3:5] @ model.head.weight.T)
    logits.sum().backward()
    assert model.model.model.embed_tokens.weight.grad.abs().sum() > 0  # type: ignore[union-attr]
