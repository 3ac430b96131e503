"""Tiny Qwen3 models that tests train, save and load: a config, and functions that write model directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TINY_QWEN: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


def make_base(
    path: Path, characters: str, *, tied: bool = True, num_rows: int | None = None, max_positions: int = 128
) -> Path:
    """Write a tiny model whose tokenizer has a token for every character, and no mask token.

    Args:
        path: The model's directory.
        characters: The characters; <pad> and <eos> are further tokens.
        tied: Whether the LM head is the embedding.
        num_rows: Rows of the embedding, if it has more than the tokenizer has tokens.
        max_positions: Maximum number of tokens in a text.
    """
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    other = {"num_hidden_layers": 2, "max_position_embeddings": max_positions, "tie_word_embeddings": tied}
    ids = {"vocab_size": num_rows or len(vocabulary), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen3Config(**TINY_QWEN | other | ids, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def training_config(
    run_name: str, source: Path | None, *, num_steps: int, interval: int, max_length: int = 128, **backbone: Any
) -> dict[str, Any]:
    """Return the config of a short training on sums.

    Args:
        run_name: The run's name.
        source: Directory of the model to train; ``None`` for a new model with a tokenizer of characters.
        num_steps: Number of steps.
        interval: Steps between two checkpoints and between two validations.
        max_length: Maximum number of tokens in a sample.
        backbone: Further options of the backbone.
    """
    tokenizer: dict[str, Any] = {"class_path": "CharacterTokenizer"}
    if source is not None:
        tokenizer = {"class_path": "PretrainedTokenizer", "init_args": {"source": str(source)}}
    return {
        "run_name": run_name,
        "trainer": {
            "accelerator": "cpu", "max_steps": num_steps, "limit_val_batches": 1, "val_check_interval": interval,
            "log_every_n_steps": 1, "enable_progress_bar": False,
            "callbacks": [{
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"save_last": True, "every_n_train_steps": interval, "save_top_k": -1},
            }],
        },
        "model": {
            "backbone": {"source": None if source is None else str(source), **backbone},
            "objective": {"class_path": "Hybrid", "init_args": {"slot_sizes": [4]}},
            "sampling": {"max_new_tokens": 12},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.02}},
            "schedule": {"warmup_steps": 1},
        },
        "data": {
            "task": {"class_path": "Additions", "init_args": {"num_train": 64, "num_validation": 4, "num_test": 3}},
            "tokenizer": tokenizer, "batch_size": 8, "max_length": max_length,
        },
    }  # fmt: skip


def make_sampling(source: Path, path: Path) -> Path:
    """Copy a model's directory; the copy's generation config asks for sampling, as Qwen's does."""
    shutil.copytree(source, path)
    file = path / "generation_config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    config |= {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    file.write_text(json.dumps(config))
    return path


def make_bytes_base(
    path: Path, *, mask: bool = False, max_positions: int = 512, special: Sequence[str] = (), added: Sequence[str] = ()
) -> Path:
    """Write a random model with a token for every byte and some longer ones, and with further tokens if asked."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Longer tokens that cross the borders between parts of JSON texts: quotes and punctuation, keywords, numbers.
    merges = [('"', ","), ("Ġ", '"'), ("t", "r"), ("tr", "u"), ("{", '"'), ("1", "2"), ("12", "3"), ("a", '"')]
    texts = ["<pad>", "<eos>", *alphabet, *("".join(pair) for pair in merges), *["<mask>"] * mask, *special, *added]
    make_base(path, "", num_rows=len(texts), max_positions=max_positions)
    bpe = models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    names = {"pad_token": "<pad>", "eos_token": "<eos>"} | ({"mask_token": "<mask>"} if mask else {})
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.add_tokens([*special], special_tokens=True)
    wrapped.add_tokens([*added])
    wrapped.save_pretrained(path)
    return path
