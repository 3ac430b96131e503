"""A tokenizer whose ids have gaps: its highest tokens can be written, and ids of no token never are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import refusion_lit
from refusion_lit.data.module import InstructionDataModule
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import Autoregressive, LLaDA, ReFusion, WeDLM
from refusion_lit.evaluation.likelihood import autoregressive
from refusion_lit.families.block_diffusion.token_editing import other_tokens
from refusion_lit.modeling.saving import save_model
from refusion_lit.modeling.vocabulary import read_special_tokens
from refusion_lit.objectives import Hybrid
from refusion_lit.tasks import InstructionFiles
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.types import ModelTraits, SamplingParams

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz 0123456789{}[]":,'
EOS = 70


def write_gapped_model(path: Path, *, mask: bool = True, eos: int = EOS, num_rows: int = 80) -> Path:
    """Write a random model whose tokenizer leaves ids 3 to 9, and ids before EOS, to nobody."""
    vocabulary = {"<pad>": 0, **({"<|mask|>": 2} if mask else {}), **{c: 10 + i for i, c in enumerate(CHARACTERS)}}
    vocabulary["<eos>"] = eos
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    names = {"pad_token": "<pad>", "eos_token": "<eos>"} | ({"mask_token": "<|mask|>"} if mask else {})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    config = AutoConfig.for_model(
        "qwen3", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=num_rows, initializer_range=0.3, pad_token_id=0,
        eos_token_id=eos, bos_token_id=None, max_position_embeddings=256,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def known_ids(tokenizer: Any) -> set[int]:
    return set(tokenizer.get_vocab().values())


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("decoder", [Autoregressive(), ReFusion(), LLaDA(), WeDLM()], ids=lambda d: type(d).__name__)
def test_decoders_write_every_token_and_no_gap(tmp_path: Path, decoder: Any, temperature: float) -> None:
    attention = "bidirectional" if isinstance(decoder, LLaDA) else "causal"
    overrides = refusion_lit.BackboneConfig(source=str(write_gapped_model(tmp_path)), attention=attention)
    model = refusion_lit.load(tmp_path, overrides=overrides)
    sampling = SamplingParams(max_new_tokens=48, temperature=temperature)
    rows = model.generate(["abc"] * 8, decoder=decoder, sampling=sampling, batch_size=8, allow_mismatch=True)
    drawn = {token for row in rows for token in row.token_ids}
    assert drawn <= known_ids(model.tokenizer) - {2}
    # The tokenizer has 47 tokens: a decoder that took this for the number of ids would write no higher id.
    assert temperature == 0 or max(drawn) >= 40


@torch.no_grad()
def test_likelihoods_leave_gaps_out(tmp_path: Path) -> None:
    model = refusion_lit.load(write_gapped_model(tmp_path), dtype="float64")
    context, text = model.encode("abc"), [*model.encode("9z,"), EOS]
    value, _ = autoregressive(model.backbone, context, text)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    logits = base(torch.tensor([[*context, *text]])).logits[0, len(context) - 1 : -1]
    logits = logits[:, sorted(known_ids(model.tokenizer))].log_softmax(-1)
    places = [sorted(known_ids(model.tokenizer)).index(token) for token in text]
    assert value == pytest.approx(float(logits[range(len(text)), places].sum()))


def test_schemas_are_kept_without_gaps(tmp_path: Path) -> None:
    model = refusion_lit.load(write_gapped_model(tmp_path))
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}, "n": {"type": "boolean"}},
              "required": ["a", "n"], "additionalProperties": False}  # fmt: skip
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0)
    rows = model.generate(["abc"] * 4, decoder=ReFusion(), sampling=sampling, json_schema=schema, allow_mismatch=True)
    for row in rows:
        assert json.loads(row.text).keys() == {"a", "n"}
        assert {*row.token_ids} <= known_ids(model.tokenizer)


def test_replacements_are_tokens(tmp_path: Path) -> None:
    special = read_special_tokens(AutoTokenizer.from_pretrained(write_gapped_model(tmp_path)))
    uniform = torch.arange(0, 1, 1 / 400)[None]
    for token in (12, EOS, 2):
        drawn = other_tokens(torch.full((1, 400), token), uniform, special)
        assert set(drawn.flatten().tolist()) == {*range(10, 10 + len(CHARACTERS)), EOS} - {token}


def test_a_training_fits_and_exports_the_gaps(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"{i} a", "response": f"z{i}"}) + "\n" for i in range(8)))
    source = write_gapped_model(tmp_path / "base", num_rows=EOS + 1)  # a row for every id, and no more
    task = InstructionFiles(train=str(rows), validation=str(rows))
    data = InstructionDataModule(task, PretrainedTokenizer(source=str(source)), batch_size=4)
    tokenizer = data.built_tokenizer
    backbone = refusion_lit.BackboneConfig(source=str(source))
    module = SlotDiffusionModule(backbone, tokenizer, Hybrid(slot_sizes=(4,)))
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, limit_val_batches=0)
    trainer.fit(module, data)
    assert module.model.special_tokens.vocab_size == EOS + 1 == module.model.head.weight.shape[0]
    module.model.traits = ModelTraits(predictions=("mask", "next_token_in_slot"))
    save_model(module.model, tokenizer, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "generation_config.json").read_text())["refusion"]
    assert stored["vocab_size"] == EOS + 1
    assert {*stored["unused_token_ids"]} == {*range(EOS)} - known_ids(tokenizer)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    from refusion_lit.refusion import custom_generate

    [written] = custom_generate.generate(torch.tensor([[12, 13]]), model=base, max_new_tokens=24).tolist()
    model = refusion_lit.load(tmp_path / "out")
    [row] = model.generate_ids([[12, 13]], max_new_tokens=24)
    assert written[2:] == row.token_ids
    assert {*written} <= known_ids(tokenizer)


def test_a_model_without_a_mask_token_gets_a_free_id_or_is_refused(tmp_path: Path) -> None:
    """The tokenizers library counts tokens, so it would give the mask token the id of another token."""
    model = refusion_lit.load(write_gapped_model(tmp_path / "high", mask=False, eos=EOS))
    vocabulary = model.tokenizer.get_vocab()
    assert len({*vocabulary.values()}) == len(vocabulary)


def test_prompts_with_an_id_of_no_token_are_refused(tmp_path: Path) -> None:
    model = refusion_lit.load(write_gapped_model(tmp_path))
    with pytest.raises(ValueError, match=r"prompt 0: expected .* got 5"):
        model.generate_ids([[12, 5]])
    assert model.generate_ids([[12, EOS]], decoder=Autoregressive(), max_new_tokens=2, allow_mismatch=True)


def test_tokens_without_a_row_in_the_embedding_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"tokenizer: .*at most 70 .*'<eos>'"):
        model = refusion_lit.load(write_gapped_model(tmp_path, num_rows=EOS))
    assert model.backbone.head.weight.shape[0] == EOS + 1
