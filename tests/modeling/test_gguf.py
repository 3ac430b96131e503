"""GGUF files, written here by the gguf package with weights that are known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import Autoregressive
from refusion_lit.modeling.gguf import load_gguf

gguf = pytest.importorskip("gguf")

TOKENS = ["<unk>", "<s>", "</s>", *"0123456789+=,;>", "12", "34"]
MERGES = ["1 2", "3 4"]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2, rms_norm_eps=1e-5, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model as llama.cpp stores it: query and key rows in the order of its rotary embedding."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    control, normal = 3, 1
    writer.add_token_types([control] * 3 + [normal] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.model.state_dict().items():
        stored_name = OUTER.get(name.removesuffix(".weight"))
        if stored_name is None:
            _, layer, inner = name.removesuffix(".weight").split(".", 2)
            stored_name = f"blk.{layer}.{NAMES[inner]}"
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[inner])
            if heads:
                halves = weight.view(heads, 2, config.head_dim // 2, config.hidden_size)
                weight = halves.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{stored_name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_directory_holds_the_same_model(model: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert main(["import-gguf", str(file), "--output", str(output)]) == 0
    assert "quantization" not in (output / "config.json").read_text()
    loaded = LlamaForCausalLM.from_pretrained(output)
    ids = torch.tensor([[1, 5, 9, 4, 3, 17]])
    with torch.no_grad():
        actual, expected = loaded(input_ids=ids, attention_mask=torch.ones_like(ids)), model(input_ids=ids)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="tokenizer: .*endoftext"):  # which transformers adds to the file's tokens
        text_model = refusion_lit.load(output)
    assert text_model.tokenizer.convert_ids_to_tokens(text_model.encode("12+34=")) == ["12", "+", "34", "="]
    assert text_model.generate(["12+34="], decoder=Autoregressive(), max_new_tokens=4)[0].num_tokens == 4


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "got .*missing.gguf"), (b"no model", "does not start as one"), (b"GGUF" + bytes(8), "cannot be read")],
)
def test_other_files_are_refused_in_one_line(
    content: bytes | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing.gguf"
    if content is not None:
        path = tmp_path / "other.gguf"
        path.write_bytes(content)
    assert main(["import-gguf", str(path), "--output", str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.search(expected, message)
    assert not (tmp_path / "model").exists()


def test_a_file_with_values_that_are_not_finite_is_refused(file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    data = file.read_bytes()
    damaged.write_bytes(data[:-4] + torch.tensor(torch.nan).numpy().tobytes())
    with pytest.raises(ValueError, match=r"damaged\.gguf.*NaN"):
        load_gguf(damaged)


def test_a_directory_with_files_is_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main(["import-gguf", str(file), "--output", str(tmp_path)]) == 2
    assert "new or empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
