"""Every row of bad_input.md beside this file: one clear line, an exit code that is not zero, no traceback."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.conftest import QUICKSTART, REPOSITORY, TINY, checkpoint, trained  # noqa: F401 - fixtures
from refusion_lit import load
from refusion_lit.cli import main
from robustness.test_safe_loading import RunsCode

DOCUMENT = Path(__file__).with_name("bad_input.md").read_text(encoding="utf-8")
COMMANDS, _, PYTHON = DOCUMENT.partition("## From Python")
ROWS, CALLS = (
    {name: message.replace("\\|", "|") for name, message in re.findall(r"^\| (.+?) \| `(.+)` \|$", part, re.M)}
    for part in (COMMANDS, PYTHON)
)
MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
BLOCKS_OF_8 = {"attention": "block_causal", "block_size": 8}
GENERATE = ["generate", "--max_new_tokens=24", "--decoder.slot_size=8"]
# TINY without options of the trainer and of a new model, because ``test`` reads a checkpoint.
TEST = [option for option in TINY if "trainer." not in option and "backbone" not in option]


@dataclass
class Place:
    """Where a case may write, and a good checkpoint to spoil. Methods return arguments of a command or write a file."""

    folder: Path
    checkpoint: str

    def text(self, name: str, text: str, encoding: str = "utf-8") -> Path:
        path = self.folder / name
        path.write_bytes(text.encode(encoding))
        return path

    def prompts(self, text: str, name: str = "prompts.jsonl", encoding: str = "utf-8") -> list[str]:
        return [*GENERATE, f"--ckpt_path={MODEL}", f"--prompts={self.text(name, text, encoding)}"]

    def generate(self, source: object, *options: str) -> list[str]:
        return [*GENERATE, "--prompt=12+34>", f"--ckpt_path={source}", *options]

    def fit(self, *options: str) -> list[str]:
        return ["fit", "--config", QUICKSTART, *TINY, f"--runs_dir={self.folder / 'runs'}", *options]

    def fit_from(self, source: Path, *options: str) -> list[str]:
        """Return a training that starts from a directory's weights."""
        tiny = [option for option in TINY if "backbone" not in option]
        runs = f"--runs_dir={self.folder / 'runs'}"
        return ["fit", "--config", QUICKSTART, *tiny, runs, "--model.backbone={source: " + str(source) + "}", *options]

    def test(self, *options: str) -> list[str]:
        runs = f"--runs_dir={self.folder / 'runs'}"
        return ["test", "--config", QUICKSTART, *TEST, runs, f"--ckpt_path={self.checkpoint}", *options]

    def data(self, text: str, *options: str, encoding: str = "utf-8") -> list[str]:
        """Return a training on a file, in place of the quickstart's task."""
        config = self.folder / "data.yaml"
        file = self.text("rows.jsonl", text, encoding)
        task = {"class_path": "InstructionFiles", "init_args": {"train": str(file), "validation_fraction": 0.0}}
        values = {"task": task, "tokenizer": {"class_path": "CharacterTokenizer", "init_args": {"characters": "abé"}}}
        config.write_text(json.dumps({"data": values}))
        tiny = [option for option in TINY if "data.task" not in option]
        runs = f"--runs_dir={self.folder / 'runs'}"
        return ["fit", "--config", QUICKSTART, *tiny, runs, "--config", str(config), *options]

    def directory(self, change: Callable[[Path], object]) -> list[str]:
        copy = self.folder / "model"
        shutil.copytree(MODEL, copy)
        change(copy)
        return self.generate(copy)

    def with_changed_bytes(self, change: Callable[[bytes], bytes]) -> list[str]:
        path = self.folder / "bad.ckpt"
        path.write_bytes(change(Path(self.checkpoint).read_bytes()))
        return self.generate(path)

    def changed_checkpoint(self, change: Callable[[dict], object]) -> Path:
        values = torch.load(self.checkpoint, weights_only=True)
        change(values)
        torch.save(values, self.folder / "bad.ckpt")
        return self.folder / "bad.ckpt"

    def with_changed_values(self, change: Callable[[dict], object]) -> list[str]:
        return self.generate(self.changed_checkpoint(change))


def _without(directory: Path, name: str) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    key = next(key for key in weights if name in key)
    save_file({k: v for k, v in weights.items() if k != key}, path, {"format": "pt"})


def _change(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    key = next(key for key in weights if name in key)
    save_file({**weights, key: change(weights[key])}, path, {"format": "pt"})


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _damage_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def _config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _own_code(directory: Path) -> None:
    _config(directory, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (directory / "own.py").write_text(f"open({str(directory / 'ran')!r}, 'w').close()\n")


def _pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": RunsCode(directory / "ran")}, directory / "pytorch_model.bin")


CASES: dict[str, Callable[[Place], list[str]]] = {
    "an empty prompt": lambda p: [*GENERATE, f"--ckpt_path={MODEL}", "--prompt="],
    "an empty prompt in a file": lambda p: p.prompts('{"prompt": "12+34>"}\n{"prompt": ""}\n'),
    "an empty prompts file": lambda p: p.prompts("\n"),
    "a prompts file that does not exist": lambda p: [*GENERATE, f"--ckpt_path={MODEL}", "--prompts=none.txt"],
    "a broken JSON line in a prompts file": lambda p: p.prompts('{"prompt": "12+34>"}\n{"prompt":\n'),
    "a JSON line without a prompt": lambda p: p.prompts('{"query": "12+34>"}\n'),
    "a prompts file in another encoding": lambda p: p.prompts("12+34é>\n", "prompts.txt", "latin-1"),
    "a prompt longer than the context": lambda p: p.prompts("12+34," * 100 + "\n", "prompts.txt"),
    "a test prompt longer than the context": lambda p: [
        *p.test(),
        f"--ckpt_path={p.changed_checkpoint(_short_context)}",  # the last path counts
        "--model.sampling.max_new_tokens=8",
        "--model.decoders.refusion.num_serial_blocks=1",
    ],
    "a bound on the cache below the longest prompt": lambda p: [
        *p.prompts("12+34>\n", "prompts.txt"),
        "--max_cache_tokens=20",
    ],
    "a bound on the cache below the longest test prompt": lambda p: p.test("--model.decoding.max_cache_tokens=5"),
    "a template file that does not exist": lambda p: p.generate(MODEL, f"--template={p.folder}/none"),
    "an empty template": lambda p: p.generate(MODEL, f"--template={p.text('t', '')}"),
    "a template with a span of no tokens": lambda p: p.generate(MODEL, f"--template={p.text('t', '12{{0}}')}"),
    "a template that continues after its open end": lambda p: p.generate(
        MODEL, f"--template={p.text('t', '12{{...}}+')}"
    ),
    "a template with too many lengths of spans": lambda p: p.generate(
        MODEL, f"--template={p.text('t', '{{1-9}}+{{1-9}}')}"
    ),
    "a template with more to fill in than new tokens": lambda p: p.generate(
        MODEL, f"--template={p.text('t', '{{30}};')}"
    ),
    "a template for a decoder that writes from left to right": lambda p: [
        "generate",
        "--prompt=12+34>",
        f"--ckpt_path={MODEL}",
        "--decoder=SelfSpeculative",
        "--decoder.slot_size=8",
        f"--template={p.text('t', '12+{{2}}=46;')}",
    ],
    "a JSON line whose template is no text": lambda p: p.prompts('{"prompt": "12+34>", "template": 5}'),
    "a special token's name, not in the alphabet": lambda p: p.prompts("12<|mask|>+34>\n", "prompts.txt"),
    "a response file in no directory": lambda p: p.generate(MODEL, f"--output={p.folder}/none/out.jsonl"),
    "a response file that holds something else": lambda p: p.generate(MODEL, f"--output={p.text('notes.txt', 'mine')}"),
    "a response file that is the prompts file": lambda p: [
        *p.prompts("12+34>\n"),
        f"--output={p.folder}/prompts.jsonl",
        "--overwrite",
    ],
    "two prompts with one id": lambda p: p.prompts('{"id": "a", "prompt": "1+1>"}\n{"id": "a", "prompt": "2+2>"}\n'),
    "a data file that does not exist": lambda p: p.data("", f"--data.task.train={p.folder}/none.jsonl"),
    "an empty data file": lambda p: p.data(""),
    "a field of another name": lambda p: p.data('{"qurey": "a", "response": "b"}'),
    "a field of another type": lambda p: p.data('{"query": "a", "response": 3}'),
    "an empty response": lambda p: p.data('{"query": "a", "response": " "}'),
    "a broken JSON line in a data file": lambda p: p.data('{"query": "a", "response": "b"}\n{"query"'),
    "a data file in another encoding": lambda p: p.data('{"query": "é", "response": "b"}', encoding="latin-1"),
    "only samples longer than the limit": lambda p: p.data('{"query": "aaaa", "response": "b"}', "--data.max_length=4"),
    "a generated sample longer than the limit": lambda p: p.fit("--data.task.num_train=30000", "--data.max_length=40"),
    "an unknown command": lambda p: ["trian"],
    "an unknown decoder": lambda p: p.generate(MODEL, "--decoder=ReFuson"),
    "an unknown option of a decoder": lambda p: p.generate(MODEL, "--decoder.slot_sise=3"),
    "an unknown option of the trainer": lambda p: p.fit("--trainer.max_stepz=3"),
    "a value out of range": lambda p: p.fit("--model.decoders.refusion.slot_threshold=1.5"),
    "an impossible combination of options": lambda p: p.generate(MODEL, "--decoder.num_serial_blocks=4"),
    "a prompt and a prompts file": lambda p: p.generate(MODEL, "--prompts=x"),
    "a decoder that the model was not trained for": lambda p: [
        "generate",
        "--prompt=12+34>",
        f"--ckpt_path={MODEL}",
        "--decoder=LLaDA",
    ],
    "more samples a batch than there are": lambda p: p.fit("--data.batch_size=65"),
    "a device that is not there": lambda p: p.generate(MODEL, "--device=nonsense"),
    "an attention that takes no masks": lambda p: p.fit("--model.backbone.attn_implementation=flash_attention_2"),
    "attention heads that do not share key/value heads evenly": lambda p: p.fit(
        "--model.backbone.config.num_attention_heads=5"
    ),
    "a head dimension without rotary positions": lambda p: p.fit("--model.backbone.config.head_dim=25"),
    "a model without layers": lambda p: p.fit("--model.backbone.config.num_hidden_layers=0"),
    "samples longer than the model's context": lambda p: p.fit("--model.backbone.config.max_position_embeddings=8"),
    "a negative warm-up": lambda p: p.fit("--model.schedule.warmup_steps=-1"),
    "a negative learning rate": lambda p: p.fit("--model.optimizer=AdamW", "--model.optimizer.lr=-1"),
    "no decoder at all": lambda p: p.fit("--model.decoders.refusion=null"),
    "a device that computes nothing": lambda p: p.generate(MODEL, "--device=meta"),
    "batch-invariant decoding without the fused backbone": lambda p: p.fit(
        "--model.backbone.batch_invariant=true", "--model.backbone.fused_body=false"
    ),
    "a run directory that cannot be written": lambda p: p.fit(f"--runs_dir={p.text('file', '')}"),
    "a checkpoint that does not exist": lambda p: p.generate(p.folder / "none.ckpt"),
    "resuming from a directory": lambda p: p.fit(f"--ckpt_path={MODEL}"),
    "a truncated checkpoint": lambda p: p.with_changed_bytes(lambda data: data[: len(data) // 2]),
    "a checkpoint of zeros": lambda p: p.with_changed_bytes(lambda data: bytes(len(data))),
    "a checkpoint of another program": lambda p: p.with_changed_values(lambda values: values.pop("refusion_lit")),
    "a checkpoint of a newer version": lambda p: p.with_changed_values(
        lambda values: values["refusion_lit"].update(format=99, version="9.0")
    ),
    "a checkpoint whose metadata are damaged": lambda p: p.with_changed_values(
        lambda values: values["refusion_lit"].update(traits="{")
    ),
    "resuming from a checkpoint of another architecture": lambda p: p.fit(
        "--model.backbone.config.hidden_size=24", f"--ckpt_path={p.checkpoint}"
    ),
    "resuming from a checkpoint with another tokenizer": lambda p: p.fit(
        "--data.tokenizer.characters=0123456789+,;=>-", f"--ckpt_path={p.checkpoint}"
    ),
    "a truncated safetensors file": lambda p: p.directory(lambda d: _half(d / "model.safetensors")),
    "a safetensors file with a damaged header": lambda p: p.directory(
        lambda d: _damage_header(d / "model.safetensors")
    ),
    "a safetensors file that lacks a weight": lambda p: p.directory(lambda d: _without(d, "q_proj")),
    "a directory with weights of more layers than its config": lambda p: p.directory(
        lambda d: _config(d, num_hidden_layers=1)
    ),
    "a training from a directory with another tokenizer": lambda p: p.fit_from(
        MODEL, "--data.tokenizer.characters=+,;=>0123456789"
    ),
    "a checkpoint with another attention than it was trained with": lambda p: [
        *p.generate(p.checkpoint),
        "--attention=bidirectional",
    ],
    "a checkpoint with another block size than it was trained with": lambda p: [
        *p.with_changed_values(lambda values: values["refusion_lit"].update(traits=json.dumps(BLOCKS_OF_8))),
        "--attention=block_causal",
        "--block_size=4",
        "--decoder=ReFusion",  # which has the slot size of these rows; the checkpoint's own decoder has none
    ],
    "a checkpoint whose weights are not finite": lambda p: p.with_changed_values(_with_nan),
    "resuming from a checkpoint whose weights are not finite": lambda p: p.fit(
        f"--ckpt_path={p.changed_checkpoint(_with_nan)}", "--trainer.max_steps=9"
    ),
    "a checkpoint whose weights are integers": lambda p: p.with_changed_values(_with_integers),
    "weights of another shape": lambda p: p.directory(
        lambda d: _change(d, "q_proj", lambda weight: weight[:-1].clone())
    ),
    "a directory whose weights are not finite": lambda p: p.directory(
        lambda d: _change(d, "q_proj", lambda weight: weight * torch.nan)
    ),
    "a directory whose weights are integers": lambda p: p.directory(lambda d: _change(d, "q_proj", torch.Tensor.int)),
    "a directory without weights": lambda p: p.directory(lambda d: (d / "model.safetensors").unlink()),
    "a directory without a tokenizer": lambda p: p.directory(lambda d: (d / "tokenizer.json").unlink()),
    "a directory of an unknown architecture": lambda p: p.directory(lambda d: _config(d, model_type="unheard")),
    "a directory whose config is not JSON": lambda p: p.directory(lambda d: (d / "config.json").write_text("{")),
    "a directory whose config has text for a number": lambda p: p.directory(lambda d: _config(d, hidden_size="x")),
    "a directory whose config has a negative size": lambda p: p.directory(lambda d: _config(d, hidden_size=-1)),
    "a directory trained for an unknown attention": lambda p: p.directory(
        lambda d: _config(d, refusion_lit={"attention": "sideways"})
    ),
    "a drafter that does not exist": lambda p: p.generate(MODEL, f"--draft={p.folder / 'none'}"),
    "a training of a drafter that does not exist": lambda p: p.fit(f"--model.backbone.draft={p.folder / 'none'}"),
    "a checkpoint that runs code": lambda p: p.with_changed_values(
        lambda values: values.update(callbacks=RunsCode(p.folder / "ran"))
    ),
    "weights that run code": lambda p: p.directory(_pickle_weights),
    "a directory that brings its own code": lambda p: p.directory(_own_code),
}


def _with_integers(values: dict) -> None:
    weights = values["state_dict"]
    name = next(iter(weights))
    weights[name] = weights[name].long()


def _with_nan(values: dict) -> None:
    next(iter(values["state_dict"].values())).view(-1)[0] = float("nan")


def _short_context(values: dict) -> None:
    metadata = values["refusion_lit"]
    metadata["architecture"] = json.dumps(json.loads(metadata["architecture"]) | {"max_position_embeddings": 16})


@pytest.mark.parametrize("call", CALLS)
def test_call_from_python(call: str) -> None:
    with pytest.raises(ValueError, match=re.escape(CALLS[call])) as error:
        eval(f"load(MODEL).{call.strip('`')}", {"load": load, "MODEL": MODEL})
    assert "\n" not in str(error.value)


def test_the_tables_and_the_cases_have_the_same_rows() -> None:
    assert list(ROWS) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_row(
    name: str,
    checkpoint: str,  # noqa: F811 - the fixture
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = CASES[name](Place(tmp_path, checkpoint))
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of configs it does not know
        assert main(args) == 2
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("refusion-lit: error:")]
    assert ROWS[name] in line
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("ran"))
