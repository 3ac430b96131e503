"""Usage errors are one line with the option, the fault, and the nearest right name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli.generate import build_parser
from refusion_lit.cli.lightning import RefusionCLI, parse_only
from refusion_lit.cli.parser import suggest

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"


@pytest.fixture(scope="module")
def cli() -> RefusionCLI:
    return parse_only()


def refusal(cli: RefusionCLI, command: str, *args: str) -> str:
    """Return the message for arguments that are refused."""
    with pytest.raises(ValueError, match=r".") as refused:
        cli.parse([command, *args])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
    return str(refused.value)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--precision=16"], "'precision'.*'trainer.precision'"),
        (["--trainer.max-stepz=3"], "'trainer.max-stepz'.*'trainer.max_steps'"),
        (["--nothing_like_it=3"], "'nothing_like_it'"),
        (["--config"], "config: expected one argument"),
        (["--data.batch_size"], "^data.batch_size: expected one argument"),
        (["--data.batch_size=many"], "^data.batch_size: .*int.*many"),
        (["--data.batch_size=1.5"], "^data.batch_size: .*int.*1.5"),
        (["--model.sampling.stop=x"], "^model.sampling.stop: .*tuple.*x"),
        (["--seed_everything=-1"], "^seed_everything: expected .*, got -1"),
        (
            ["--data.task.class_path=InstructionFiles", "--data.task.init_args.malformed=ignore"],
            "^data.task: malformed: .*'error', 'skip'.*ignore",
        ),
        (["--trainer.detect_anomaly=maybe"], "^trainer.detect_anomaly: .*bool.*maybe"),
        (["--trainer.max_epochs=x"], "^trainer.max_epochs: .*int.* x$"),
        (["--data.task.num_tran=3"], "^data.task: .*'num_tran'.*'num_train'"),
        (["--data.task=Additoins"], "^data.task: .*Additoins.*'Additions'"),
        (["--data.task=Hybrid"], "^data.task: .*Hybrid.*Additions, .*Gsm8k"),
        (["--data.task=no_such_package.Task"], "^data.task: .*no_such_package"),
        (["--data.task=no.yaml"], "^data.task: .*no.yaml"),
        (["--data.task=null"], "^data.task: .*None"),
        (["--data=none.yaml"], "^data: .*none.yaml"),
        (["--config=none.yaml"], "^config: .*none.yaml"),
        (["--model.sampling=abc"], "^model.sampling: .*abc"),
        (["--trainer.callbacks=Nope"], "^trainer.callbacks: .*Nope"),
        (["--model.optimizer=Adamm"], "^model.optimizer: .*Adamm.*'Adam'"),
        (["--model.optimizer.lr=x"], "^model.optimizer.lr: (?!.*class_path).*float.*x$"),
        (["--model.objective=Hybird"], "^model.objective: .*Hybird.*'Hybrid'"),
        (
            ["--model.objective=GroupPolicy", "--model.objective.rewards=[Additions]"],
            "^model.objective: rewards: .*Additions",
        ),
        (["--model.decoders.refusion.slot_sise=4"], "^model.decoders.refusion.slot_sise: .*'slot_size'"),
        (["--model.decoders.refusion.slot_size=x"], "^model.decoders.refusion.slot_size: .*int.* x$"),
        (["--model.decoders={a: {class_path: ReFusion, init_args: {k: x}}}"], "^model.decoders: k: .*int.* x$"),
        (["--model.decoders.a=Autoregressive", "--model.decoders.a.slot_size=4"], "'slot_size'.* no options"),
        (["--model.backbone.attention=up"], "^model.backbone.attention: .*'causal', .* up$"),
        (["stray"], "stray"),
    ],
)
def test_wrong_arguments(cli: RefusionCLI, args: list[str], expected: str) -> None:
    message = refusal(cli, "fit", "--config", QUICKSTART, *args)
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"modle": {"seed": 1}}, "'modle.seed'.*'model.seed'"),
        ({"model": {"samplin": {"seed": 1}}}, "'model.samplin.seed'.*'model.sampling.seed'"),
        ({"model": 3}, "model: expected a mapping"),
        ({"model": {"sampling": [3]}}, "model.sampling: expected a mapping"),
        ({"model": {"sampling": {"max_new_tokns": 3}}}, "'model.sampling.max_new_tokens'"),
        ({"data": {"batch_size": "x"}}, "data.batch_size: .*int.* x$"),
        ({"data": {"task": {"class_path": "Gsm8k", "init_args": {"tset": "x"}}}}, "data.task: .*'tset'.*'test'"),
        ({"model": {"decoders": {"a": {"class_path": "ReFuson"}}}}, "model.decoders: .*ReFuson.*'ReFusion'"),
        ({"trainer.max_epochs": "x"}, "trainer.max_epochs: .*int.* x$"),
    ],
)
def test_wrong_configs_are_named(cli: RefusionCLI, config: dict[str, object], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    message = refusal(cli, "fit", "--config", QUICKSTART, "--config", str(file))
    assert message.startswith(f"{file}: ")
    assert re.search(expected, message), message


def test_the_run_s_seed_is_the_default_of_the_others(cli: RefusionCLI, tmp_path: Path) -> None:
    """``seed_everything`` sets ``model.seed`` and ``data.seed`` unless a config or an option does."""
    parsed = cli.parse(["fit", "--config", QUICKSTART, "--seed_everything=3"]).fit
    assert (parsed.model.seed, parsed.data.seed) == (3, 3)
    file = tmp_path / "seeds.yaml"
    file.write_text("seed_everything: 3\nmodel: {seed: 0}\n")
    parsed = cli.parse(["fit", "--config", QUICKSTART, f"--config={file}", "--data.seed=1"]).fit
    assert (parsed.model.seed, parsed.data.seed) == (0, 1)
    parsed = cli.parse(["fit", "--config", QUICKSTART, f"--config={file}", "--seed_everything=5"]).fit
    assert (parsed.model.seed, parsed.data.seed) == (5, 5)


def test_what_is_required_may_come_from_a_config(cli: RefusionCLI) -> None:
    assert "data.task" in refusal(cli, "fit", "--data.task.num_train=3", "--data.task=Additions")
    assert refusal(cli, "fit").endswith("required: data.task")
    cli.parse(["fit", "--config", QUICKSTART])
    cli.parse(["fit", "--data.task=Additions", "--data.tokenizer=CharacterTokenizer"])


@pytest.mark.parametrize(
    "args",
    [
        TINY,
        ["--data.task=HumanEval", "--data.task.files=x.jsonl"],
        ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=1e-3"],
        ["--trainer.callbacks=[{class_path: ModelCheckpoint, init_args: {save_last: true}}]"],
        ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=step"],
        ["--trainer.precision", "bf16-mixed", "--trainer.devices", "[0, 1]", "--trainer.strategy=ddp"],
        ["--model.decoders.new=configs/decoder/llada.yaml", "--model.decoders.new.steps=3"],
        ["--model.decoders.new", "configs/decoder/llada.yaml"],
        ["--model.sampling.stop=[a, b]", "--model.sampling.top_k=null", "--model.sampling.temperature=1e-1"],
        ["--seed_everything=true", "-c", QUICKSTART],
    ],
)
def test_right_arguments_are_parsed(cli: RefusionCLI, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert cli.parse(["fit", "--config", QUICKSTART, *args]).fit.data.batch_size


def test_a_boolean_option_alone_means_true_beside_a_trainer(cli: RefusionCLI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    alone = ["--trainer.enable_progress_bar", "--model.decoding.allow_mismatch", "--trainer.fast_dev_run"]
    given = ["--trainer.enable_model_summary", "false", "--model.decoding.share_prefixes=false"]
    parsed = cli.parse(["fit", *alone, *given, "--config", QUICKSTART]).fit
    trainer, decoding = parsed.trainer, parsed.model.decoding
    assert [trainer.enable_progress_bar, trainer.fast_dev_run, decoding.allow_mismatch] == [True, True, True]
    assert [trainer.enable_model_summary, decoding.share_prefixes] == [False, False]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--decoder.slot_sise=3"], "'slot_sise'.*'slot_size'"),
        (["--decoder=LLaDA", "--decoder.slot_size=3"], "'slot_size'.*steps"),
        (["--decoder=ReFusion", "--decoder.slot_size=0"], "^decoder.slot_size: expected .*, got 0"),
        (["--promt=1"], "'promt'.*'prompt'"),
        (["--max_tokens=1"], "'max_tokens'(?! of ).*'max_new_tokens'"),
        (["--prompt=1", "--prompt=2"], "^prompt: .*2 times.*--prompts"),
        (["--stop=;", "--stop", ","], r"^stop: .*2 times.*\[A, B\]"),
        (["--dtype=fp32"], "^dtype: .*'float32'.* fp32$"),
        (["--decoder=no.yaml"], "^decoder: .*no.yaml"),
    ],
)
def test_commands_without_a_trainer(args: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as refused:
        build_parser().parse([f"--ckpt_path={MODEL}", *args])
    assert "\n" not in str(refused.value)


def test_options_of_a_decoder_may_stand_before_it() -> None:
    assert build_parser().parse(["--ckpt_path=x", "--decoder.steps", "3", "--decoder=LLaDA"]).decoder.steps == 3
    assert build_parser().parse(["--decoder.slot_size", "4", f"--ckpt_path={MODEL}", "--seed=1"]).decoder.slot_size == 4


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("fitt", ["fit", "test"], "'fit'"),
        ("tset", ["fit", "test"], "'test'"),
        ("max-new-tokens", ["max_new_tokens"], "'max_new_tokens'"),
        ("precision", ["revision", "trainer.precision"], "'trainer.precision'"),
        ("max_new_tokns", ["max_new_tokens", "max_steps"], "'max_new_tokens'"),
    ],
)
def test_the_nearest_name_is_suggested(word: str, known: list[str], expected: str) -> None:
    assert f"did you mean {expected}" in suggest(word, known)


@pytest.mark.parametrize(("word", "known"), [("trian", ["trace", "fit"]), ("x", ["k"])])
def test_a_name_that_is_not_similar_is_not_suggested(word: str, known: list[str]) -> None:
    assert "did you mean" not in suggest(word, known)
