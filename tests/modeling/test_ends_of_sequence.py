"""All ends of sequence count: the tokenizer's, the config's and those of generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import refusion_lit
from refusion_lit.data.tokenizers import PretrainedTokenizer, tokenizer_files, tokenizer_from_files
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.saving import save_model
from refusion_lit.modeling.vocabulary import read_special_tokens
from refusion_lit.types import SamplingParams

END_OF_TEXT, END_OF_TURN = 0, 1
MAX_NEW_TOKENS = 24


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a model stored as Qwen3 is: the tokenizer names one end of sequence, the generation config two."""
    words = ["<|endoftext|>", "<|im_end|>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0], eos_token=words[1])
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(3)
    config = Qwen3Config(vocab_size=len(words), eos_token_id=END_OF_TURN, initializer_range=0.5, **sizes, **heads)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [END_OF_TURN, END_OF_TEXT]
    model.generation_config.pad_token_id = END_OF_TEXT
    model.save_pretrained(tmp_path / "model")
    wrapped.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, 10, (48, 5), generator=generator).tolist()


def test_greedy_text_is_that_of_transformers_with_its_own_defaults(directory: Path) -> None:
    library = AutoModelForCausalLM.from_pretrained(directory).eval()
    model = refusion_lit.load(directory)
    ours = model.generate_ids(prompts(), decoder=Autoregressive(), max_new_tokens=MAX_NEW_TOKENS, batch_size=8)
    reasons = set()
    for prompt, row in zip(prompts(), ours, strict=True):
        theirs = library.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS)[0, len(prompt) :].tolist()
        assert row.token_ids == theirs
        reasons.add(row.token_ids[-1] if row.finish_reason == "eos" else row.finish_reason)
    assert reasons >= {END_OF_TEXT, END_OF_TURN}, "both ends occur"


def test_the_tokenizers_own_end_is_the_first(directory: Path) -> None:
    special = read_special_tokens(PretrainedTokenizer(source=str(directory)).build(None))
    assert special.eos_token_ids == (END_OF_TURN, END_OF_TEXT)
    assert END_OF_TEXT not in special.banned_token_ids, "padding that ends a response can be drawn"


def test_ends_survive_checkpoints_and_exports(directory: Path, tmp_path: Path) -> None:
    model = refusion_lit.load(directory)
    stored = tokenizer_from_files(tokenizer_files(model.tokenizer))
    assert read_special_tokens(stored) == model.backbone.special_tokens
    save_model(model.backbone, model.tokenizer, tmp_path / "saved")
    assert refusion_lit.load(tmp_path / "saved").backbone.special_tokens == model.backbone.special_tokens
    stored_config = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert stored_config["eos_token_id"] == [END_OF_TURN, END_OF_TEXT]


@pytest.mark.parametrize("unknown", [999, -1])
def test_ids_of_no_token_are_left_out_with_a_warning(directory: Path, unknown: int) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [END_OF_TURN, unknown]}))
    with pytest.warns(UserWarning, match=rf"eos_token_id.*{unknown}"):
        tokenizer = PretrainedTokenizer(source=str(directory)).build(None)
    assert read_special_tokens(tokenizer).eos_token_ids == (END_OF_TURN,)


@pytest.mark.parametrize("has_token", [True, False])
def test_the_generation_config_replaces_the_configs_ends_as_in_transformers(directory: Path, has_token: bool) -> None:
    """A tokenizer without EOS token gets the first of them."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    if not has_token:
        path = directory / "tokenizer_config.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in values.items() if name != "eos_token"}))
    test_greedy_text_is_that_of_transformers_with_its_own_defaults(directory)
    (directory / "generation_config.json").unlink()
    library = AutoModelForCausalLM.from_pretrained(directory)
    ends = read_special_tokens(PretrainedTokenizer(source=str(directory)).build(None)).eos_token_ids
    assert {*ends} == {library.generation_config.eos_token_id, *((END_OF_TURN,) if has_token else ())}


RULES: dict[str, object] = {
    "suppress_tokens": [3],
    "begin_suppress_tokens": [4],
    "bad_words_ids": [[5, 6]],
    "sequence_bias": [[[5], -9.0]],
    "forced_bos_token_id": 2,
    "forced_eos_token_id": 0,
    "min_length": 9,
    "min_new_tokens": 3,
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.3,
    "exponential_decay_length_penalty": [2, 1.5],
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_changes_texts_of_transformers_alone_is_named_when_loading(directory: Path, rule: str) -> None:
    path = directory / "generation_config.json"
    values = json.loads(path.read_text()) | {"top_k": 20, "temperature": 0.6, "do_sample": False}
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None}
    path.write_text(json.dumps(neutral | values))
    refusion_lit.load(directory)  # warnings are errors
    path.write_text(json.dumps(neutral | values | {rule: RULES[rule]}))
    value = str(RULES[rule]).translate({ord(mark): f"\\{mark}" for mark in "[]."})
    with pytest.warns(UserWarning, match=f"{rule}: {value}") as caught:
        refusion_lit.load(directory)
    assert len(caught) == 1


def test_sampled_text_can_end_with_either(directory: Path) -> None:
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    rows = refusion_lit.load(directory).generate_ids(prompts(), decoder=Autoregressive(), sampling=sampling)
    assert {row.token_ids[-1] for row in rows if row.finish_reason == "eos"} == {END_OF_TEXT, END_OF_TURN}
