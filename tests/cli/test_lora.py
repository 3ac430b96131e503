"""Low-rank adapters from training to text, and exported merged or alone, by the commands that a user runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.decoding import ReFusion
from support.tiny import TINY_QWEN, make_base, training_config

pytest.importorskip("peft")

CHARACTERS = "0123456789+=,;>"
NUM_TOKENS = 2 + len(CHARACTERS)  # without a mask token, which training adds
RANK, ALPHA = 2, 8.0
IDS = torch.tensor([[5, 6, NUM_TOKENS, 9, 4, NUM_TOKENS, 7]])  # with the mask token


def write_config(path: Path, source: Path | None, **backbone: Any) -> list[str]:
    """Write a training's config; return the options that name it."""
    path.write_text(yaml.safe_dump(training_config("adapters", source, num_steps=6, interval=3, **backbone)))
    return ["--config", str(path), "--num_threads=1"]


LORA = {"lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.1}}


def train(folder: Path, base: Path, **backbone: Any) -> Path:
    """Train adapters; return the run's directory."""
    options = write_config(folder / "fit.yaml", base, **LORA, **backbone)
    assert main(["fit", *options, f"--runs_dir={folder}", "--run_version=fit"]) == 0
    return folder / "adapters" / "fit"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own and no spare row."""
    return make_base(tmp_path_factory.mktemp("base") / "model", CHARACTERS, tied=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return train(tmp_path_factory.mktemp("runs"), base)


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def expected_logits(checkpoint: Path, base: Path, **overrides: Any) -> Tensor:
    """Compute the logits of a checkpoint from the definition: W + alpha / rank * B A, without peft or our loading."""
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        name = name.removeprefix("backbone.model.base_model.model.").replace(".base_layer", "")
        if "lora_A" in name:
            up = state["backbone.model.base_model.model." + name.replace("lora_A", "lora_B")]
            target = name.replace(".lora_A.default", "")
            weights[target] = weights[target] + ALPHA / RANK * up @ value
        elif "lora_B" not in name:
            weights[name] = value
    config = Qwen3Config.from_pretrained(base, **overrides)
    config.vocab_size = len(weights["model.embed_tokens.weight"])
    model = Qwen3ForCausalLM(config).eval()
    model.load_state_dict(weights)
    return logits(model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def our_logits(source: Path) -> Tensor:
    backbone = refusion_lit.load(source).backbone
    with torch.no_grad():
        return backbone.logits(backbone.hidden_states(IDS, torch.arange(IDS.shape[1])[None], None))


def test_training_changes_the_logits_and_the_checkpoint_alone_has_them(checkpoint: Path, base: Path) -> None:
    expected = expected_logits(checkpoint, base)
    before = AutoModelForCausalLM.from_pretrained(base)
    before.resize_token_embeddings(NUM_TOKENS + 1)
    assert (logits(before.eval()) - expected)[..., :NUM_TOKENS].abs().max() > 0.1
    moved = base.rename(base.with_name("elsewhere"))
    try:
        torch.testing.assert_close(our_logits(checkpoint), expected)
    finally:
        moved.rename(base)


def test_a_loaded_checkpoint_is_merged_and_decodes_by_the_fused_backbone(checkpoint: Path) -> None:
    model = refusion_lit.load(checkpoint)
    assert not [name for name in model.backbone.state_dict() if "lora" in name]
    assert model.backbone.make_fused_body() is not None


def test_generate_needs_the_checkpoint_alone(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"--ckpt_path={checkpoint}", "--prompt=12+34>", "--max_new_tokens=12"]) == 0
    expected = refusion_lit.load(checkpoint).generate(["12+34>"], max_new_tokens=12)[0].text
    assert capsys.readouterr().out.rstrip("\n") == expected


@pytest.mark.parametrize("config", ["training", "none"])
def test_test_and_predict_decode_with_the_adapters(checkpoint: Path, base: Path, tmp_path: Path, config: str) -> None:
    backbone: dict[str, Any] = {"config": {}, **LORA} if config == "training" else {"config": {}}
    options = write_config(tmp_path / "test.yaml", base if config == "training" else None, **backbone)
    options += [f"--runs_dir={tmp_path}", f"--ckpt_path={checkpoint}"]
    for command in ("test", "predict"):
        assert main([command, *options, f"--run_version={command}"]) == 0
    files = ("test/predictions_refusion.jsonl", "predict/predictions.jsonl")
    tested, predicted = (
        [json.loads(line) for line in (tmp_path / "adapters" / file).read_text().splitlines()] for file in files
    )
    ids = [line["id"] for line in tested]
    answers = refusion_lit.load(checkpoint).generate(
        [line["prompt"] for line in tested], decoder=ReFusion(), max_new_tokens=12, ids=ids
    )
    assert [line["response_ids"] for line in tested] == [answer.token_ids for answer in answers]
    assert [line["response_ids"] for line in predicted] == [line["response_ids"] for line in tested]


def losses(run: Path, name: str) -> list[float]:
    header, *rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return [float(row[header.index(name)]) for row in rows if row[header.index(name)]]


def test_validate_gives_the_loss_of_the_adapted_model(checkpoint: Path, run: Path, tmp_path: Path) -> None:
    options = write_config(tmp_path / "validate.yaml", None, config={})
    args = ["validate", *options, f"--runs_dir={tmp_path}", f"--ckpt_path={checkpoint}", "--run_version=v"]
    assert main(args) == 0
    assert losses(tmp_path / "adapters" / "v", "val/loss") == pytest.approx(losses(run, "val/loss")[-1:], rel=1e-5)


def test_a_resumed_training_ends_with_the_same_weights(checkpoint: Path, run: Path, base: Path, tmp_path: Path) -> None:
    halfway = next((run / "checkpoints").glob("*step=3.ckpt"))
    resumed = tmp_path / "adapters" / "fit" / "checkpoints"
    resumed.mkdir(parents=True)
    shutil.copy(halfway, resumed)
    options = write_config(tmp_path / "fit.yaml", base, **LORA)
    args = ["fit", *options, f"--runs_dir={tmp_path}", "--run_version=fit", "--ckpt_path=last"]
    assert main(args) == 0
    states = [torch.load(path, weights_only=True) for path in (checkpoint, resumed / "last.ckpt")]
    assert states[1]["global_step"] == 6
    weights, again = (state["state_dict"] for state in states)
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_training_without_adapters_does_not_resume_from_them(
    checkpoint: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_config(tmp_path / "fit.yaml", base)
    assert main(["fit", *options, f"--runs_dir={tmp_path}", f"--ckpt_path={checkpoint}"]) == 2
    assert "ckpt_path: expected weights that fit the architecture in the config" in capsys.readouterr().err


def test_export_merges_by_default(checkpoint: Path, base: Path, tmp_path: Path) -> None:
    output = tmp_path / "merged"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={output}"]) == 0
    expected = expected_logits(checkpoint, base)
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    assert type(model) is Qwen3ForCausalLM
    torch.testing.assert_close(logits(model), expected)
    torch.testing.assert_close(our_logits(output), expected)
    options = write_config(tmp_path / "test.yaml", base, **LORA)  # the directory brings the model, without adapters
    assert main(["test", *options, f"--runs_dir={tmp_path}", f"--ckpt_path={output}", "--run_version=t"]) == 0
    assert (tmp_path / "adapters" / "t" / "results.json").is_file()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in the example
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_rows", [NUM_TOKENS, NUM_TOKENS + 5])
def test_exported_adapters_on_the_base_have_the_checkpoints_logits(tmp_path: Path, tied: bool, num_rows: int) -> None:
    """The mask token's row is new to the base, added at its end or one of its spare rows."""
    base = make_base(tmp_path / "base", CHARACTERS, tied=tied, num_rows=num_rows)
    overrides = {"rms_norm_eps": 0.1, "sliding_window": None}  # the first changes the logits
    checkpoint = train(tmp_path, base, config=overrides) / "checkpoints" / "last.ckpt"
    output = tmp_path / "adapters_alone"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={output}", "--adapter_only=true"]) == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {p.name for p in output.iterdir()}
    assert not list(output.glob("model*.safetensors"))
    assert (output / "adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert AutoTokenizer.from_pretrained(output).mask_token_id == NUM_TOKENS
    # The way that the model card shows.
    example = re.search(r"```python\n(.*?)```", (output / "README.md").read_text(), re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example.group(1), names)
    expected = expected_logits(checkpoint, base, **overrides)
    torch.testing.assert_close(logits(names["model"].eval()), expected)
    torch.testing.assert_close(logits(names["model"].merge_and_unload()), expected)


def test_adapters_alone_are_refused_where_they_would_not_help(
    tmp_path: Path, base: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export_error(source: Path) -> str:
        capsys.readouterr()
        args = ["export", f"--ckpt_path={source}", f"--output={tmp_path / 'out'}", "--adapter_only=true"]
        assert main(args) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "adapter_only: expected the checkpoint of a run with model.backbone.lora" in export_error(base)
    for folder, source, options, message in (
        ("whole", base, {}, "adapter_only: expected a model with low-rank adapters"),
        ("random", None, {"config": TINY_QWEN, **LORA}, "adapter_only: expected adapters of a pretrained base"),
    ):
        config = write_config(tmp_path / f"{folder}.yaml", source, **options)
        args = ["fit", *config, f"--runs_dir={tmp_path / folder}", "--run_version=fit", "--trainer.max_steps=1"]
        assert main([*args, "--trainer.callbacks.every_n_train_steps=1"]) == 0
        assert message in export_error(tmp_path / folder / "adapters" / "fit" / "checkpoints" / "last.ckpt")


def test_a_directory_of_adapters_is_no_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "adapters_alone"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={output}", "--adapter_only=true"]) == 0
    assert main(["generate", f"--ckpt_path={output}", "--prompt=12+34>"]) == 2
    assert "backbone.source: expected a model, got adapters alone" in capsys.readouterr().err


def test_a_layer_that_the_model_lacks_is_refused_with_those_it_has(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_config(tmp_path / "fit.yaml", base, lora={"target_modules": ["q_pro"]})
    assert main(["fit", *options, f"--runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "backbone.lora.target_modules: expected all-linear, or some of " in error
    assert "o_proj, q_proj, " in error
    assert "got ['q_pro']; correct the names." in error
