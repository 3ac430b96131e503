"""Next-token models with sliding windows are converted: trained, loaded and decoded by a user's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import ReFusion
from refusion_lit.text_model import TextModel
from support.tiny import make_base, training_config

CHARACTERS = "0123456789+=,;>"
WINDOW = 64
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"final_logit_softcapping": None, "head_dim": 8, "sliding_window_pattern": 2},
}


def make_windowed_base(path: Path, model_type: str, window: int = WINDOW) -> Path:
    """Write a tiny next-token model with a sliding window."""
    make_base(path, CHARACTERS)
    config = AutoConfig.for_model(
        model_type, vocab_size=2 + len(CHARACTERS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, sliding_window=window,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, **WINDOWED[model_type],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def fit(folder: Path, source: Path, max_length: int) -> int | None:
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump(training_config("windowed", source, num_steps=4, interval=4, max_length=max_length)))
    return main(["fit", "--config", str(path), "--num_threads=1", f"--runs_dir={folder}"])


@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_model_with_a_sliding_window_is_converted(model_type: str, tmp_path: Path) -> None:
    source = make_windowed_base(tmp_path / "base", model_type)
    model = refusion_lit.load(source)
    assert model.backbone.window == WINDOW
    assert model.backbone.traits.predictions == ("next_token",)
    ids = torch.arange(2, 2 + 2 * WINDOW).remainder(len(CHARACTERS))[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        hidden = model.backbone.hidden_states(ids, torch.arange(ids.shape[1])[None], None)
        logits = model.backbone.logits(hidden)[..., : expected.shape[-1]]  # without the new mask token
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert fit(tmp_path, source, WINDOW) in (None, 0)
    [checkpoint] = tmp_path.rglob("last.ckpt")
    converted = refusion_lit.load(checkpoint)
    assert converted.backbone.window == WINDOW
    assert isinstance(converted.default_decoder, ReFusion)
    batch = converted.generate(["12+34>", "12+34,56+78>"], max_new_tokens=12, batch_size=2)
    alone = [converted.generate([prompt], max_new_tokens=12)[0] for prompt in ("12+34>", "12+34,56+78>")]
    assert [row.token_ids for row in batch] == [row.token_ids for row in alone]
    # Tokens of a slot are not decoded in the order of the text, so the window is the context.
    with pytest.raises(ValueError, match=rf"context of {WINDOW}"):
        converted.generate(["12+34," * 12], max_new_tokens=12)
    check_export(checkpoint, converted, tmp_path / "exported")


def check_export(checkpoint: Path, model: TextModel, directory: Path) -> None:
    """Check that an exported program fills the window with the model's text, and refuses more."""
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}"]) == 0
    library: Any = AutoModelForCausalLM.from_pretrained(directory)
    for query in ("12+34>", "12+34,56+78,90+11>"):
        prompt = torch.tensor([model.encode(query)])
        num_left = WINDOW - prompt.shape[1]
        max_new_tokens = num_left - num_left % 16  # two blocks of whole slots of 8 tokens
        options = {"custom_generate": str(directory), "trust_remote_code": True}
        [row] = model.generate([query], decoder=ReFusion(num_serial_blocks=2), max_new_tokens=max_new_tokens)
        text = library.generate(prompt, max_new_tokens=max_new_tokens, **options)[0, prompt.shape[1] :]
        assert text.tolist() == row.token_ids
        with pytest.raises(ValueError, match="max_new_tokens"):
            library.generate(prompt, max_new_tokens=num_left + 1, **options)


def test_samples_longer_than_the_window_are_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A slot's tokens are not trained in text order, so the window is the context."""
    source = make_windowed_base(tmp_path / "base", "mistral", window=16)
    assert fit(tmp_path, source, 128) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert "data.max_length" in line
    assert "16 tokens" in line
