"""Counts the files and lines that a reader meets on the way of a prompt or of a training batch.

usage: python docs/code_paths.py

A file counts, with all its lines, if one of its functions runs between the start and the end of the way. Loading a
model (modeling/loading, checkpoints, tokenizers) and the lean body are counted apart; what runs while modules are
imported is left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "refusion_lit"
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"
ASIDE = ("modeling/lean/", "modeling/load", "checkpoints/", "data/tokenizers.py", "modeling/checks.py")
BACKBONE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


def files_of(way: Callable[[], object]) -> list[str]:
    """Return the package's files in which a function runs."""
    found: set[str] = set()
    importing = 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal importing
        if frame.f_code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            found.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(watch)
    try:
        way()
    finally:
        sys.setprofile(None)
    return sorted(found)


def command_to_text() -> Callable[[], object]:
    """From the command line to the printed text."""
    from refusion_lit.cli import main

    arguments = ["generate", "--ckpt_path", str(MODEL), "--prompt", "12+34,56+78>", "--max_new_tokens", "32"]
    return lambda: main(arguments)


def ids_to_text() -> Callable[[], object]:
    """From ``TextModel.generate_ids`` to text, on transformers' body."""
    import refusion_lit
    from refusion_lit.modeling.loading import BackboneConfig

    model = refusion_lit.load(MODEL, overrides=BackboneConfig(source=str(MODEL), lean=False))
    return lambda: model.generate_ids([[4, 5, 13, 6, 7, 17]], max_new_tokens=32)


def examples_to_loss() -> Callable[[], object]:
    """From a file of examples to the hybrid loss of a batch."""
    import lightning as L

    from refusion_lit import SlotDiffusionModule
    from refusion_lit.data.module import InstructionDataModule
    from refusion_lit.data.tokenizers import CharacterTokenizer
    from refusion_lit.modeling.loading import BackboneConfig
    from refusion_lit.objectives import Hybrid
    from refusion_lit.tasks import InstructionFiles

    examples = ROOT / "runs" / "code_paths.jsonl"
    examples.parent.mkdir(exist_ok=True)
    examples.write_text('{"query": "12+34>", "response": "12+34=46;"}\n' * 8, encoding="utf-8")
    task = InstructionFiles(train=str(examples), preset="query_response")
    data = InstructionDataModule(task, CharacterTokenizer(characters="0123456789+=;,> "), batch_size=4)
    module = SlotDiffusionModule(BackboneConfig(config=BACKBONE), data.built_tokenizer, Hybrid(slot_sizes=(4,)))
    module.configure_model()
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    return lambda: trainer.fit(module, data.train_dataloader())


def main() -> None:
    """Print a table for each way."""
    for name, make in (("command to text", command_to_text), ("token ids to text", ids_to_text),
                       ("examples to loss", examples_to_loss)):  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            files = files_of(make())
        lines = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files}
        counted = [file for file in files if not file.startswith(ASIDE)]
        print(f"{name}: {len(counted)} files, {sum(lines[file] for file in counted)} lines")
        for file in files:
            print(f"  {lines[file]:4d} {file}{'' if file in counted else ' (counted apart)'}")


if __name__ == "__main__":
    main()
