"""The conversion's trial runs from its questions to its figures, on a model that counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from experiments.refusion_pays import convert
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from experiments import common
from refusion_lit.cli import main
from support.tiny import TINY_QWEN

TOKENS = ("<pad>", "<unk>", "<eos>", *"0123456789")  # SmolLM2's EOS has id 2, too


def write_counter(path: Path) -> None:
    """Write a model that continues a digit by all higher ones, and then ends."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    ids = {"vocab_size": len(TOKENS), "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    other = {"tie_word_embeddings": False, "max_position_embeddings": 512}
    model = Qwen3ForCausalLM(Qwen3Config(**TINY_QWEN | other | ids))
    following = [3, 3, 3, *range(4, len(TOKENS)), 2]  # a mask, of the mean embedding, is a 0
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(len(TOKENS), TINY_QWEN["hidden_size"]))
        head = torch.zeros(len(TOKENS), TINY_QWEN["hidden_size"])
        head[following, range(len(TOKENS))] = 4.0
        model.get_output_embeddings().weight.copy_(head)
    model.save_pretrained(path)


def command(*args: str) -> None:
    """Run a command as the experiment does, but in this process, which has imported everything."""
    threads = ("--num_threads", "1") if args[0] == "fit" else ()
    assert main([*args, *threads]) == 0


def test_a_trial_of_the_conversion_trains_three_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_counter(tmp_path / "runs" / "smollm2" / "base")
    questions = tmp_path / "questions.jsonl"
    texts = [f"{i:0120}"[::-1] + str(i % 10) for i in range(32)]  # long, as rows are packed
    questions.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    options = ["--questions", str(questions), "--prompts", f"{questions}@1", "--work_dir", "trial"]
    for module in (common, convert):
        monkeypatch.setattr(module, "command", command)
    options += ["--num_questions", "16", "--max_steps", "2"]
    monkeypatch.setattr(sys, "argv", ["convert.py", *options])
    convert.main()
    answers = [json.loads(line) for line in Path("trial/answers.jsonl").read_text().splitlines()]
    assert {row["prompt"]: row["response"] for row in answers}[texts[5]] == "6789"
    assert [row["prompt"] for row in answers if not row["response"]] == [texts[9]], "left out of the training"
    for number, asked in ((2, texts[16:24]), (3, texts[24:])):
        further = Path(f"trial/round_{number}/questions.jsonl").read_text().splitlines()
        assert [json.loads(line)["prompt"] for line in further] == asked
    runs = json.loads(Path("trial/real_model.json").read_text())["runs"]
    assert list(runs) == ["windows", "round 2", "round 3"]
    for run in runs.values():
        assert run["decoders"]["base, Autoregressive"]["texts"] == ["123456789<eos>"]
        assert run["decoders"]["ReFusion bonus 32x1"]["tokens_per_forward"] > 0
