"""Usage errors are one line with the option, what was expected, what was got, and the nearest right name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from cli.conftest import QUICKSTART, REPOSITORY, TINY
from refusion_lit.cli.generate import build_parser
from refusion_lit.cli.lightning import RefusionCLI, parse_only
from refusion_lit.cli.usage_errors import nearest, removal_of, removed
from refusion_lit.contrib.rl import Reward
from refusion_lit.tasks import Example


@pytest.fixture(scope="module")
def cli() -> RefusionCLI:
    return parse_only()


def refusal(cli: RefusionCLI, command: str, *args: str) -> str:
    """Return the message for arguments that are refused."""
    with pytest.raises(ValueError, match=r".") as refused:
        cli.parse(cli.parser, [command, *args])
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--precision=16"], "unknown option 'precision'; did you mean 'trainer.precision'?"),
        (["--trainer.max-stepz=3"], "unknown option 'trainer.max-stepz'; did you mean 'trainer.max_steps'?"),
        (["--trainer.max_step=3"], "unknown option 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
        (["--nothing_like_it=3"], "unknown option 'nothing_like_it'; `refusion-lit fit --help` lists them"),
        (["--config"], "config: expected a value, got none; write --config=VALUE."),
        (["--data.batch_size"], "data.batch_size: expected a value, got none; write --data.batch_size=VALUE."),
        (
            ["--data.batch_size=many"],
            "data.batch_size: expected an integer, got 'many'; set it to such a value, for example 32 (the default).",
        ),
        (["--data.batch_size=1.5"], "data.batch_size: expected an integer, got 1.5; set it to such a value"),
        (["--model.seed=null"], "model.seed: expected an integer, got None; set it to such a value"),
        (["--model.sampling.stop=x"], 'model.sampling.stop: expected a list (["a", "b"]), got \'x\'; set it to such'),
        (["--seed_everything=-1"], "seed_everything: expected an integer from 0 to 4294967295, got -1; set"),
        (
            ["--data.task.class_path=InstructionFiles", "--data.task.init_args.malformed=ignore"],
            "data.task.init_args.malformed: expected error or skip, got 'ignore'; set it to such a value",
        ),
        (
            ["--trainer.detect_anomaly=maybe"],
            "trainer.detect_anomaly: expected true or false, got 'maybe'; set it to such a value",
        ),
        (["--data.task.num_tran=3"], "unknown option 'data.task.num_tran'; did you mean 'data.task.num_train'?"),
        (["--data.task=Additoins"], "got 'Additoins'; did you mean 'Additions'?"),
        (
            ["--model.objective=GroupPolicy", "--model.objective.likelihood=Exact"],
            "LeftToRight, ",  # among the likelihoods, of which other tests define some
        ),
        (
            ["--model.sampling=abc"],
            "model.sampling: expected a mapping or a YAML file, got 'abc'; write a mapping below",
        ),
        (["--data=none.yaml"], "data: expected a mapping or a YAML file, got 'none.yaml'; write a mapping below it."),
        (["--config="], "config: expected a YAML file, got ''; write --config=FILE."),
        (["--trainer.callbacks=Nope"], "choose one of BackboneFinetuning, BaseFinetuning, "),
        (
            ["--data.task=null"],
            "data.task: expected the name or import path of a class, or a YAML file, got None; choose",
        ),
        (
            ["--data.task="],
            "data.task: expected the name or import path of a class, or a YAML file, got ''; choose one",
        ),
        (["--data.task=Hybrid"], "got 'Hybrid'; choose one of Additions, Gsm8k,"),
        (
            ["--data.task=no_such_package.Task"],
            "(No module named 'no_such_package'); run in its module's directory with PYTHONPATH=., install ",
        ),
        (
            ["--data.task=no.yaml"],
            "data.task: expected a class or a YAML file, got no.yaml, which does not exist; check the path.",
        ),
        (["--model.decoders.refusion.slot_sise=4"], "did you mean 'model.decoders.refusion.slot_size'?"),
        (
            ["--model.decoders={a: {class_path: ReFusion, init_args: {k: x}}}"],
            "model.decoders.a.k: expected an integer",
        ),
        (  # whose module imports no names of the base class's annotations
            ["--model.decoders={a: {class_path: CARD, init_args: {block_size: x}}}"],
            "model.decoders.a.block_size: expected an integer",
        ),
        (["--model.decoders.a=Autoregressive", "--model.decoders.a.slot_size=4"], "'model.decoders.a.slot_size'"),
        (
            ["--model.decoders.a=Autoregressive", "--model.decoders.a.window=4"],
            "model.decoders.a has no options, which are fields of a dataclass; remove it.",
        ),
        (
            ["--config=none.yaml"],
            "config: expected a YAML file, got none.yaml (No such file or directory); check the path.",
        ),
        (
            ["stray"],
            "expected options, which start with -- as in --config FILE, got 'stray'; remove it or write --NAME",
        ),
    ],
)
def test_wrong_arguments(cli: RefusionCLI, args: list[str], expected: str) -> None:
    assert expected in refusal(cli, "fit", "--config", QUICKSTART, *args)


class OneMoreReward(Reward):
    def rewards(self, examples: Sequence[Example], responses: Sequence[str]) -> Sequence[float]:
        return [0.0] * len(responses)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Additions", "the name or import path of a class, or a YAML file"),
        ("json.JSONDecoder", "a subclass of Reward"),
    ],
)
def test_a_wrong_reward_is_answered_by_those_that_exist(cli: RefusionCLI, given: str, expected: str) -> None:
    options = ["--model.objective=GroupPolicy", f"--model.objective.rewards=[{given}]"]
    begin, _, listed = refusal(cli, "fit", "--config", QUICKSTART, *options).partition("; choose one of ")
    assert begin.endswith(f"model.objective.rewards.0: expected {expected}, got '{given}'")
    assert "OneMoreReward" in listed.split(", ")  # other tests define some, too
    assert {"Reward", "Additions", "Hybrid"}.isdisjoint(listed.split(", "))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"modle": {"seed": 1}}, "unknown option 'modle'; did you mean 'model'?"),
        ({"model": {"samplin": {"seed": 1}}}, "unknown option 'model.samplin'; did you mean 'model.sampling'?"),
        ({"model": 3}, "model: expected a mapping or a YAML file, got 3; write a mapping below it."),
        ({"model": {"sampling": {"max_new_tokns": 3}}}, "did you mean 'model.sampling.max_new_tokens'?"),
        ({"data": {"batch_size": "x"}}, "data.batch_size: expected an integer, got 'x'; set it to such a value"),
        ({"data": {"task": {"class_path": "Gsm8k", "init_args": {"tset": "x"}}}}, "did you mean 'data.task.test'?"),
        (
            {"data": {"task": []}},
            "data.task: expected the name or import path of a class, or a YAML file, got []; choose",
        ),
        ({"model": {"decoders": {"a": {"class_path": "ReFuson"}}}}, "model.decoders.a: expected"),
        (
            {"trainer.max_epochs": "x"},
            "trainer.max_epochs: expected an integer or null, got 'x'; set it to such a value.",
        ),
    ],
)
def test_wrong_configs_are_named(cli: RefusionCLI, config: dict[str, object], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    message = refusal(cli, "fit", "--config", QUICKSTART, "--config", str(file))
    assert message.startswith(f"{file}: ")
    assert expected in message


def test_the_run_s_seed_is_the_default_of_the_others(cli: RefusionCLI, tmp_path: Path) -> None:
    """It had no influence on a training before."""
    parsed = cli.parse(cli.parser, ["fit", "--config", QUICKSTART, "--seed_everything=3"]).fit
    assert (parsed.model.seed, parsed.data.seed) == (3, 3)
    file = tmp_path / "seeds.yaml"
    file.write_text("seed_everything: 3\nmodel: {seed: 0}\n")
    parsed = cli.parse(cli.parser, ["fit", "--config", QUICKSTART, f"--config={file}", "--data.seed=1"]).fit
    assert (parsed.model.seed, parsed.data.seed) == (0, 1)


def test_what_is_required_may_come_from_a_config(cli: RefusionCLI) -> None:
    order = refusal(cli, "fit", "--data.task.num_train=3", "--data.task=Additions")
    assert order == "data.task: expected a class before its options, got none; give --data.task CLASS first."
    assert refusal(cli, "fit").startswith("data.task: expected a value, got none; give it, or a config")
    cli.parse(cli.parser, ["fit", "--config", QUICKSTART])
    cli.parse(cli.parser, ["fit", "--data.task=Additions", "--data.tokenizer=CharacterTokenizer"])


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
        ["--model.sampling.stop=[a, b]", "--model.sampling.top_k=null", "--model.sampling.temperature=1e-1"],
        ["--seed_everything=true", "-c", QUICKSTART],
    ],
)
def test_right_arguments_are_parsed(cli: RefusionCLI, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert cli.parse(cli.parser, ["fit", "--config", QUICKSTART, *args]).fit.data.batch_size


def test_a_boolean_option_alone_means_true_beside_a_trainer(cli: RefusionCLI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    alone = ["--trainer.enable_progress_bar", "--model.decoding.allow_mismatch", "--trainer.fast_dev_run"]
    given = ["--trainer.enable_model_summary", "false", "--model.decoding.share_prefixes=false"]
    parsed = cli.parse(cli.parser, ["fit", *alone, *given, "--config", QUICKSTART]).fit
    trainer, decoding = parsed.trainer, parsed.model.decoding
    assert trainer.enable_progress_bar is trainer.fast_dev_run is decoding.allow_mismatch is True
    assert trainer.enable_model_summary is decoding.share_prefixes is False


def test_a_command_without_a_trainer_explains_its_options_and_those_of_the_decoder() -> None:
    parser = build_parser()
    with pytest.raises(ValueError, match=r"unknown option 'decoder\.slot_sise'; did you mean 'decoder\.slot_size'"):
        parser.parse(["--ckpt_path=x", "--decoder.slot_sise=3"])
    with pytest.raises(ValueError, match=r"unknown option 'decoder\.slot_size'; known are"):
        parser.parse(["--ckpt_path=x", "--decoder=LLaDA", "--decoder.slot_size=3"])
    assert parser.parse(["--ckpt_path=x", "--decoder.steps=3", "--decoder=LLaDA"]).decoder.steps == 3
    with pytest.raises(ValueError, match=r"unknown option 'promt'; did you mean 'prompt'"):
        parser.parse(["--ckpt_path=x", "--promt=1"])


@pytest.mark.parametrize("in_file", [True, False])
def test_a_removed_option_is_named_with_its_reason(
    cli: RefusionCLI, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(removed(), "backbone.fast_mode", "it is the default now; leave it out")
    monkeypatch.setitem(removed(), "OldDecoder", "use ReFusion")
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump({"model": {"backbone": {"fast_mode": True}}}))
    args = ["--config", str(file)] if in_file else ["--model.backbone.fast_mode=true"]
    message = refusal(cli, "fit", "--config", QUICKSTART, *args)
    assert message.endswith(
        "unknown option 'model.backbone.fast_mode': it was removed; it is the default now; leave it out."
    )
    message = refusal(cli, "fit", "--config", QUICKSTART, "--model.decoders.x=OldDecoder")
    assert (
        message == "model.decoders.x: expected a class that exists, got 'OldDecoder', which was removed; use ReFusion."
    )


@pytest.mark.parametrize(
    ("decoder", "option", "reason"),
    [
        ("ReFusion", "certainty: first", "'model.decoders.x.certainty': it was removed; its name is slot_confidence."),
        ("LLaDA", "eps: 0.1", "'model.decoders.x.eps': it was removed; Dream's time schedule ends at 0.001; leave it"),
        (
            "ReFusion",
            "fused: auto",
            "model.decoders.x.fused: expected true or false, got 'auto', which was removed; set",
        ),
    ],
)
def test_removed_options_of_a_configs_decoder_are_named(cli: RefusionCLI, decoder: str, option: str, reason: str):
    value = f"{{class_path: {decoder}, init_args: {{{option}}}}}"
    assert reason in refusal(cli, "fit", "--config", QUICKSTART, f"--model.decoders.x={value}")


def test_removed_names_are_ends_of_dotted_names() -> None:
    assert removal_of("model.backbone.config") is None
    for name, reason in removed().items():
        assert removal_of(f"model.{name}") == reason
        assert not reason.endswith(".")


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("fitt", ["fit", "test"], "; did you mean 'fit'?"),
        ("tset", ["fit", "test"], "; did you mean 'test'?"),
        ("trian", ["trace", "fit"], ""),
        ("max-new-tokens", ["max_new_tokens"], "; did you mean 'max_new_tokens'?"),
        ("precision", ["revision", "trainer.precision"], "; did you mean 'trainer.precision'?"),
        ("max_new_tokns", ["max_new_tokens", "max_steps"], "; did you mean 'max_new_tokens'?"),
        ("x", ["k"], ""),
        ("callbacks.every", ["callbacks.every"], ""),
    ],
)
def test_the_nearest_name_is_suggested_or_none(word: str, known: list[str], expected: str) -> None:
    assert nearest(word, known) == expected
