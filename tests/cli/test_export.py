"""``export``: a directory that transformers and our own programs load, with a model card."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY_TEST
from refusion_lit.checkpoints.models import read_default_decoder
from refusion_lit.cli import main
from refusion_lit.cli.export import atomic_directory
from refusion_lit.decoding import LLaDA, ReFusion, SelfSpeculative
from refusion_lit.evaluation.predictions import class_and_options
from support.forks import run_without_us
from support.tiny import make_sampling

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"


def test_export_loads_in_transformers_and_in_ours(checkpoint: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "exported"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}"]) == 0
    config = json.loads((directory / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert config["mask_token_id"] == tokenizer.mask_token_id
    assert config["refusion_lit"]["predictions"] == ["mask", "next_token_in_slot"]
    assert (directory / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(directory)
    ours, from_checkpoint = refusion_lit.load(directory), refusion_lit.load(checkpoint)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = model(ids, attention_mask=torch.ones_like(ids)).logits
        hidden = ours.backbone.hidden_states(ids, torch.arange(4)[None], None)
        torch.testing.assert_close(ours.backbone.logits(hidden), expected)
    options = {"decoder": ReFusion(slot_size=4), "max_new_tokens": 12}
    assert (
        ours.generate(["12+34>"], **options)[0].token_ids
        == from_checkpoint.generate(["12+34>"], **options)[0].token_ids
    )
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}"]) == 2


def test_a_directory_names_its_own_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bonus = ReFusion(slot_size=4, num_serial_blocks=4, infill="bonus", num_drafts=3)
    options = ["--decoder=ReFusion", "--decoder.slot_size=4", "--decoder.num_serial_blocks=4"]
    options += ["--decoder.infill=bonus", "--decoder.num_drafts=3"]
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={first}", *options]) == 0
    card = (first / "README.md").read_text()
    assert "--decoder.slot_size 4 --decoder.num_serial_blocks 4 --decoder.infill bonus --decoder.num_drafts 3" in card
    model = refusion_lit.load(first)
    assert model.default_decoder == bonus
    expected, default = (model.generate(["12+34,5+6>"], decoder=d, max_new_tokens=32)[0] for d in (bonus, None))
    assert (default.token_ids, default.num_forwards) == (expected.token_ids, expected.num_forwards)
    assert main(["generate", f"--ckpt_path={first}", "--prompt=1+1>", "--max_new_tokens=16"]) == 0
    assert main(["export", f"--ckpt_path={first}", f"--output={again}"]) == 0
    assert refusion_lit.load(again).default_decoder == bonus
    config = json.loads((again / "config.json").read_text())
    for damaged in ({"class_path": "ReFusion", "init_args": {"slots": 4}}, {"init_args": 4}, "ReFusion"):
        config["refusion_lit"]["decoder"] = damaged
        (again / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        assert main(["generate", f"--ckpt_path={again}", "--prompt=1+1>"]) == 2
        assert "refusion_lit.decoder: expected a decoder with class_path and init_args" in capsys.readouterr().err
    assert main(["generate", f"--ckpt_path={again}", "--prompt=1+1>", "--decoder=ReFusion"]) == 0


def test_the_cards_program_decodes_a_model_whose_own_generation_samples(tmp_path: Path) -> None:
    source = make_sampling(MODEL, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    traits = {"attention": "causal", "predictions": ["mask", "next_token_in_slot"]}
    (source / "config.json").write_text(json.dumps(config | {"refusion_lit": traits}))
    assert main(["export", f"--ckpt_path={source}", f"--output={tmp_path / 'out'}"]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["do_sample"] is True
    card = (tmp_path / "out" / "README.md").read_text()
    (program,) = re.findall(r"```python\n(from transformers .*?)```", card, re.DOTALL)
    printed = run_without_us(program.replace("...", "12+34,56+78>"), tmp_path)
    assert "".join(printed.split()) == "12+34=46;56+78=134;"


def test_a_decoder_that_others_could_not_use_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "from refusion_lit.decoding import Autoregressive\n\n\nclass Own(Autoregressive): ...\n"
    (tmp_path / "own_decoder.py").write_text(source)
    export = ["export", f"--ckpt_path={MODEL}", f"--output={tmp_path / 'out'}"]
    for decoder, message in (
        ("LLaDA", "trained with causal attention. "),
        ("SelfSpeculative", "decoder: expected a model with a drafter"),
        ("RecomputeKV", "decoder: expected a decoder of this package"),
        ("own_decoder.Own", "decoder: expected a decoder of this package"),
    ):
        assert main([*export, f"--decoder={decoder}"]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_results_of_another_model_are_not_on_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"results": {"d": {"score": 1.0}}, "fingerprints": {"d": {"weights": "0123456789abcdef"}}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    output = tmp_path / "out"
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={output}", f"--results={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert f"results: {tmp_path} was made with " in error
    assert "weights was '0123456789abcdef', is '" in error
    assert not output.exists()


class FakeHub:
    """Stands for the hub; remembers what was sent."""

    sent: dict[str, object]

    def create_repo(self, repository: str, **options: object) -> None:
        self.sent["created"] = (repository, options)

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.sent["files"] = {path.name for path in Path(folder_path).iterdir()}


def test_export_writes_a_card_from_the_run_and_uploads(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    test = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*test, "--trainer.enable_progress_bar=false"]) == 0
    sent: dict[str, object] = {}
    monkeypatch.setattr(FakeHub, "sent", sent, raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    directory, run = tmp_path / "exported", tmp_path / "quickstart" / "version_0"
    args = ["export", f"--ckpt_path={checkpoint}", f"--output={directory}", f"--results=[{run}]"]
    assert main([*args, "--push_to_hub=someone/adder"]) == 0
    assert sent["created"] == ("someone/adder", {"private": True, "exist_ok": True})
    assert {"README.md", "model.safetensors", "config.json"} <= set(sent["files"])  # type: ignore[call-overload]
    card = (directory / "README.md").read_text()
    figures = json.loads((run / "results.json").read_text())["results"]["refusion"]
    assert f"| `refusion` | {figures['score']:.3f} | {figures['tokens_per_forward']:.2f} |" in card
    assert "refusion_lit.load('someone/adder')" in card
    assert "class_path: refusion_lit.refusion.objective.Hybrid" in card
    assert main([*args[:-1], f"--results=[{tmp_path}]", f"--output={tmp_path / 'other'}"]) == 2


def test_a_failed_upload_leaves_the_directory_and_says_how_to_retry(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def fails(self: FakeHub, repository: str, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(FakeHub, "create_repo", fails)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    directory = tmp_path / "exported"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={directory}", "--push_to_hub=a/b"]) == 2
    assert "push_to_hub: the upload to 'a/b' failed (no network)" in capsys.readouterr().err
    assert (directory / "model.safetensors").is_file()


def test_the_files_of_an_export_have_the_usual_permissions(checkpoint: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'exported'}"]) == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o640"}
    assert "model.safetensors" in {path.name for path in files}


def test_a_failed_export_leaves_nothing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_disk: Callable[[int | None], None]
) -> None:
    small_disk(20_000)
    assert main(["export", f"--ckpt_path={checkpoint}", f"--output={tmp_path / 'a' / 'exported'}"]) == 2
    error = capsys.readouterr().err
    assert f"output: {tmp_path / 'a' / 'exported'} cannot be written (" in error
    assert "File too large" in error
    assert list(tmp_path.iterdir()) == []


def test_options_without_a_class_change_the_directorys_own_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    flags = ["--decoder=ReFusion", "--decoder.slot_size=4", "--decoder.infill=bonus"]
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={first}", *flags]) == 0
    assert main(["export", f"--ckpt_path={first}", f"--output={second}", "--decoder.init_args.slot_threshold=0.8"]) == 0
    assert refusion_lit.load(second).default_decoder == ReFusion(slot_size=4, infill="bonus", slot_threshold=0.8)
    query = ["--prompt=12+34,56+78>", "--max_new_tokens=16", "--output"]
    for name, options in (("own", ["--decoder.slot_size=8"]), ("named", ["--decoder.class_path=ReFusion", *flags[2:]])):
        assert main(["generate", f"--ckpt_path={first}", *query, str(tmp_path / name), *options]) == 0
    made_by = [
        json.loads((tmp_path / f"{name}.meta.json").read_text())["fingerprint"]["decoder"] for name in ("own", "named")
    ]
    assert made_by[0] == made_by[1], "class and all options"


def test_an_option_alone_is_checked_with_the_own_ones(tmp_path: Path) -> None:
    """Drafts alone need ``infill: bonus``, and eight serial blocks are fitted to two slots."""
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    flags = ["--decoder=ReFusion", "--decoder.slot_size=8", "--decoder.infill=bonus", "--decoder.num_serial_blocks=8"]
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={first}", *flags]) == 0
    assert main(["export", f"--ckpt_path={first}", f"--output={second}", "--decoder.num_drafts", "2"]) == 0
    expected = ReFusion(slot_size=8, infill="bonus", num_serial_blocks=8, num_drafts=2)
    assert refusion_lit.load(second).default_decoder == expected
    output = tmp_path / "answers.jsonl"
    options = ["--prompt=12+34,56+78>", "--max_new_tokens=16", f"--output={output}", "--decoder.num_drafts=2"]
    assert main(["generate", f"--ckpt_path={first}", *options]) == 0
    made_by = json.loads(output.with_name("answers.jsonl.meta.json").read_text())["fingerprint"]["decoder"]
    assert made_by == {**class_and_options(expected), "num_serial_blocks": 2}


def test_an_option_alone_changes_an_own_decoder_of_another_class(tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    flags = ["--decoder=SelfSpeculative", "--decoder.slot_size=4", "--decoder.num_drafts=2"]
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={first}", *flags]) == 0
    assert main(["export", f"--ckpt_path={first}", f"--output={second}", "--decoder.slot_size=8"]) == 0
    assert refusion_lit.load(second).default_decoder == SelfSpeculative(slot_size=8, num_drafts=2)


def test_the_default_decoder_is_read_without_the_weights(trained: Path) -> None:
    masked = MODEL.parent / "additions-bidirectional"
    assert isinstance(read_default_decoder(masked, attention="bidirectional"), LLaDA)
    assert read_default_decoder(MODEL, draft="any") == SelfSpeculative()
    assert read_default_decoder(trained) == refusion_lit.load(trained).default_decoder
    with pytest.raises(ValueError, match=r"^ckpt_path: expected a directory or a hub id"):
        read_default_decoder("no/ne")


def test_an_exported_directory_states_its_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"--ckpt_path={MODEL}", f"--output={tmp_path / 'exported'}"]) == 0
    args = ["generate", f"--ckpt_path={tmp_path / 'exported'}", "--prompt=1", "--attention=bidirectional"]
    assert main(args) == 2
    assert (
        "attention: expected causal, which the model was trained with, got 'bidirectional'" in capsys.readouterr().err
    )


def test_an_exported_directory_keeps_the_prompt_template(checkpoint: str, tmp_path: Path) -> None:
    from refusion_lit.modeling.saving import save_model

    model = refusion_lit.load(checkpoint)
    save_model(model.backbone, model.tokenizer, tmp_path / "exported", prompt_template="{query}>")
    assert refusion_lit.load(tmp_path / "exported").prompt_template == "{query}>"
    assert model.prompt_template == "{query}"


def test_an_empty_directory_that_exists_is_filled_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is not replaced, because it may be a working directory or the target of a link."""
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path, place in ((".", "here"), (str(tmp_path / "link"), "there")):
        with atomic_directory(path) as directory:
            (directory / "file").write_text("content")
            assert not (tmp_path / place / "file").exists()
        assert (tmp_path / place / "file").read_text() == "content"
    assert Path("file").is_file()
    assert sorted(os.listdir(tmp_path)) == ["here", "link", "there"]
