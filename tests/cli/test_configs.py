"""Every shipped config is parsed and instantiated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml

from cli.conftest import QUICKSTART, REPOSITORY, build_cli
from refusion_lit.cli.lightning import parse_only
from refusion_lit.cli.parser import OneLineParser
from refusion_lit.decoding import Decoder
from refusion_lit.modeling.formats import FORMATS
from refusion_lit.objectives import Objective
from refusion_lit.training.module import SlotDiffusionModule
from refusion_lit.types import ModelTraits
from support.tiny import TINY_QWEN

CONFIGS = REPOSITORY / "configs"
CPU = ["--trainer.accelerator=cpu", "--trainer.precision=32-true"]
NO_DOWNLOAD = [
    "--model.backbone.source=null",
    f"--model.backbone.config={json.dumps(TINY_QWEN)}",
    "--model.backbone.dtype=float32",
    "--data.tokenizer=CharacterTokenizer",
    "--data.tokenizer.characters=abc",
]


@pytest.fixture
def data_file(tmp_path: Path) -> str:
    rows = [{"question": f"q {i}", "answer": f"a {i}", "query": "ab", "response": "c"} for i in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _overrides(name: str, data_file: str) -> list[str]:
    """Return the options with which a config runs here: on a CPU, without downloads, and with a small data file."""
    if name == "ablation":  # the config has no model
        return [f"--model.backbone.config={json.dumps(TINY_QWEN)}"]
    if name == "own_data":
        return [f"--data.task.train={data_file}", "--data.task.preset=query_response"]
    if name == "gsm8k_small":
        return [f"--data.task.train={data_file}", f"--data.task.test={data_file}"]
    if name == "refusion_qwen3_8b":
        single_device = ["--trainer.devices=1", "--trainer.strategy.data_parallel_size=1"]
        return [*CPU, *single_device, *NO_DOWNLOAD, f"--data.task.train={data_file}"]
    if name == "tools" or name.startswith("refusion_qwen3"):
        return [*CPU, *NO_DOWNLOAD, f"--data.task.train={data_file}"]
    if name == "policy":
        start = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
        return [f"--model.backbone.source={start}", f"--data.tokenizer.source={start}"]
    if name == "dflash":
        start = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
        sources = [f"--model.backbone.source={start}", f"--data.tokenizer.source={start}"]
        return [*sources, f"--data.task.train={data_file}", "--data.task.init_args.query_field=query"]
    if name == "convert":
        task = [f"--data.task.init_args.train={data_file}", "--data.task.init_args.query_field=query"]
        return [*CPU, *NO_DOWNLOAD, *task]
    return []


@pytest.mark.parametrize("name", ["refusion_qwen3_0_6b", "refusion_qwen3_8b"])
def test_another_task_reads_the_fields_of_its_preset(name: str, data_file: str) -> None:
    args = ["--config", str(CONFIGS / f"{name}.yaml"), "--data.task=Gsm8k"]
    cli = build_cli(*args, *_overrides(name, data_file))
    assert cli.datamodule.task.examples("train")[0].query.startswith("q ")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_run_configs_instantiate(path: Path, data_file: str) -> None:
    cli = build_cli("--config", str(path), *_overrides(path.stem, data_file))
    config = yaml.safe_load(path.read_text())
    assert set(cli.model.evaluation.named_decoders) == set(config["model"]["decoders"])
    assert cli.model.evaluation.sampling.max_new_tokens == config["model"]["sampling"]["max_new_tokens"]
    cli.model.configure_model()
    assert cli.model.backbone is not None
    mask = cli.model.backbone.special_tokens.mask_token_id
    assert mask == cli.datamodule.built_tokenizer.mask_token_id


def test_the_ablation_compares_decoders_that_fit_the_quickstarts_model() -> None:
    def build_module(name: str) -> SlotDiffusionModule:
        return build_cli("--config", str(CONFIGS / f"{name}.yaml"), *_overrides(name, "")).model

    traits = build_module("quickstart").objective.traits
    decoders = build_module("ablation").evaluation.named_decoders
    assert len(decoders) > 3
    assert {name: decoder.requirements().mismatches(traits) for name, decoder in decoders.items()} == {
        name: [] for name in decoders
    }


@pytest.mark.parametrize(
    ("environment", "option", "expected"), [("1", [], 1), (None, [], 2), ("1", ["--num_threads=2"], 2)]
)
def test_threads_of_a_config_yield_to_the_environment(
    environment: str | None, option: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # no warning of a busy machine
    build_cli("--config", str(CONFIGS / "quickstart.yaml"), *option)
    assert torch.get_num_threads() == expected


def test_the_qwen_config_converts_with_the_published_hyper_parameters() -> None:
    config = yaml.safe_load((CONFIGS / "refusion_qwen3_0_6b.yaml").read_text())
    assert config["model"]["optimizer"]["init_args"] == {"lr": 2.0e-5, "weight_decay": 0.0}
    assert (config["model"]["schedule"]["warmup_steps"], config["trainer"]["max_epochs"]) == (0, 4)
    assert config["model"]["objective"]["init_args"]["slot_sizes"] == [4, 8, 16, 32]
    assert (config["data"]["batch_size"], config["data"]["max_length"]) == (4, 4096)
    assert config["model"]["backbone"]["gradient_checkpointing"] is True


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_trains_float32_weights(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    assert config["trainer"].get("precision", "32-true") in ("32-true", "bf16-mixed")
    assert config["model"].get("backbone", {}).get("dtype", "float32") == "float32"


def test_the_8b_config_builds_the_whole_model_on_the_meta_device(data_file: str) -> None:
    architecture = CONFIGS / "architecture" / "qwen3_8b.yaml"
    args = ["--config", str(CONFIGS / "refusion_qwen3_8b.yaml"), *CPU, *NO_DOWNLOAD]
    args += ["--trainer.devices=1", "--trainer.strategy.data_parallel_size=1", f"--data.task.train={data_file}"]
    args += [f"--model.backbone.config={json.dumps(yaml.safe_load(architecture.read_text()))}"]
    cli = build_cli(*args)
    with torch.device("meta"):
        cli.model.configure_model()
    hidden, heads, key_heads, dim, inner, vocab, num_layers = 4096, 32, 8, 128, 12288, 151936, 36
    attention, mlp = 2 * hidden * dim * (heads + key_heads), 3 * hidden * inner
    norms = 2 * hidden + 2 * dim  # before attention and MLP, and of the heads of queries and keys
    num_parameters = num_layers * (attention + mlp + norms) + 2 * vocab * hidden + hidden
    assert sum(p.numel() for p in cli.model.parameters()) == num_parameters
    assert all(p.is_meta for p in cli.model.parameters())
    assert 8.1e9 < num_parameters < 8.3e9  # the number in docs/scale.md


@pytest.mark.parametrize("folder", ["decoder", "objective"])
def test_part_configs_instantiate(folder: str) -> None:
    base = {"decoder": Decoder, "objective": Objective}[folder]
    paths = sorted((CONFIGS / folder).glob("*.yaml"))
    assert paths
    for path in paths:
        parser = OneLineParser()
        parser.add_argument("--part", type=base, sub_configs=True)
        part = parser.instantiate_classes(parser.parse_args([f"--part={path}"])).part
        config = yaml.safe_load(path.read_text())
        assert type(part).__name__ == config["class_path"].rsplit(".", 1)[-1]
        for option, value in (config.get("init_args") or {}).items():
            got = getattr(part, option)
            assert (list(got) if isinstance(got, tuple) else got) == value


def test_later_configs_overlay_earlier_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model:\n  sampling:\n    max_new_tokens: 33\n")
    from refusion_lit.cli import main

    args = ["fit", "--config", str(CONFIGS / "quickstart.yaml"), "--config", str(overlay), "--print_config"]
    assert main(args) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["sampling"]["max_new_tokens"] == 33
    assert printed["model"]["backbone"]["config"]["hidden_size"] == 96


def test_a_wheel_alone_can_start(tmp_path: Path) -> None:
    """Build the wheel, install it in an empty environment, and write the configs with ``init``."""
    if not (REPOSITORY / "pyproject.toml").is_file():
        pytest.skip("not a checkout")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(build, check=True, timeout=300)
    wheel = next(tmp_path.glob("refusion_lit-*.whl"))
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True, timeout=300)
    command = [str(environment / "bin" / "refusion-lit"), "init", str(tmp_path / "project")]
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path)
    copied = {path.relative_to(tmp_path / "project") for path in (tmp_path / "project").rglob("*.yaml")}
    assert copied == {path.relative_to(REPOSITORY) for path in CONFIGS.rglob("*.yaml")}


PUBLISHED = {
    "llada_8b_instruct": "llada",
    "dream_7b_instruct": "dream",
    "fast_dllm_v2_7b": "fast_dllm_v2",
    "sdar_8b": "sdar",
    "llada2_0_mini": "llada2",
    "llada2_1_mini": "llada21",
    "refusion_8b": None,
}


# Dream's authors recommend temperature 0.2, at which the LLaDA decoder warns about its confidences.
@pytest.mark.filterwarnings("ignore:LLaDA ranks masks")
@pytest.mark.parametrize("path", sorted((CONFIGS / "published").glob("*.yaml")), ids=lambda path: path.stem)
def test_published_settings_fit_their_layout(path: Path) -> None:
    module = build_cli("--config", str(path), *CPU, *NO_DOWNLOAD).model
    (decoder,) = module.evaluation.named_decoders.values()
    decoder.check(module.evaluation.sampling)
    name = PUBLISHED[path.stem]
    traits = ModelTraits() if name is None else FORMATS[name].traits({})
    assert decoder.requirements().mismatches(traits) == []
    assert f"configs/published/{path.name}" in (REPOSITORY / "docs" / "published.md").read_text()


def test_a_seed_on_the_command_line_overrides_the_seeds_of_a_runs_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("seed_everything: 0\nmodel: {seed: 0}\ndata: {seed: 0}\n")
    cli = parse_only("fit")
    args = ["fit", "--config", QUICKSTART, f"--config={config}"]

    def seeds(*options: str) -> list[int]:
        parsed = cli.parse([*args, *options]).fit
        return [parsed.seed_everything, parsed.model.seed, parsed.data.seed]

    assert seeds() == [0, 0, 0]
    assert seeds("--seed_everything=5") == [5, 5, 5]
    assert seeds("--seed_everything=5", "--data.seed=7") == [5, 5, 7]
    assert seeds("--data.seed=7") == [0, 0, 7]


@pytest.mark.parametrize(
    ("load", "environment", "options", "expected", "warns"),
    [
        (9.0, None, [], 1, True),
        (0.5, None, [], 2, False),
        (9.0, None, ["--num_threads=2"], 2, True),
        (9.0, None, ["--ckpt_path=last", "--runs_dir=none"], 2, True),  # would resume with its number of threads
        (9.0, "2", [], 2, True),
        (9.0, None, ["--num_threads=1"], 1, False),
    ],
)
def test_a_training_on_a_busy_machine_has_one_thread_unless_the_number_is_chosen(
    load: float,
    environment: str | None,
    options: list[str],
    expected: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(int(environment or 1))
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    with pytest.warns(UserWarning, match="num_threads: .*busy") if warns else nullcontext():
        cli = build_cli("--config", str(CONFIGS / "quickstart.yaml"), *options)
    assert torch.get_num_threads() == expected
    assert cli.config.fit.num_threads == (1 if expected == 1 else 2)  # what a resumed training reads


def test_a_callback_whose_default_is_of_an_enum_is_written_to_the_config() -> None:
    options = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00"]
    cli = build_cli("--config", str(CONFIGS / "quickstart.yaml"), *options)
    text = cli.parser.dump(cli.config, skip_none=False, skip_validation=True)
    assert yaml.safe_load(text)["fit"]["trainer"]["callbacks"][-1]["init_args"]["interval"] == "step"
