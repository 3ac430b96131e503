"""What is shown while a command works: bars that move within a batch, one-line warnings, a last line."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console

import refusion_lit
from cli.conftest import QUICKSTART, REPOSITORY, TINY, TINY_TEST
from refusion_lit.cli import main
from refusion_lit.cli.decoding_progress import DecodingProgress
from refusion_lit.cli.messages import show_warnings
from refusion_lit.cli.trainer import show_own_logs
from refusion_lit.cli.trainer_progress import TrainerProgress
from refusion_lit.decoding import Autoregressive, GenerationCallback, ReFusion

MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-clean"
TINY_WITH_BARS = [option for option in TINY if "progress_bar" not in option]
PROMPTS = ["12+34>", "11+22,33+44>", "1+2,3+4,5+6>", "99+99>"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """What was written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; not as a fixture, as pytest sets its own between set-up and test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_answers_and_tokens_are_counted_within_a_batch() -> None:
    model = refusion_lit.load(MODEL)
    counts: list[tuple[float, int]] = []  # of answers and tokens
    progress = DecodingProgress(Console(file=Terminal(), force_terminal=True))

    class After(GenerationCallback):
        def on_commit(self, index: int, state: object) -> None:
            (bar,) = progress.tasks
            counts.append((bar.completed, bar.fields["num_tokens"]))

    num_tokens = 0
    for _ in range(2):  # the second call continues the bar of the first call
        callbacks = [progress.watch("ar", 2 * len(PROMPTS)), After()]
        rows = model.generate(PROMPTS, decoder=Autoregressive(), max_new_tokens=24, batch_size=4, callbacks=callbacks)
        num_tokens += sum(row.num_tokens for row in rows)
    progress.stop()
    (bar,) = progress.tasks
    assert bar.completed == 8
    assert [tokens for _, tokens in counts] == list(range(1, num_tokens + 1))  # token by token
    assert len({answers for answers, _ in counts}) > 4  # answers of one batch end one by one
    shown = re.fullmatch(r"answers  ([\d,]+) tokens/s", bar.fields["text"])
    assert shown is not None
    assert int(shown[1].replace(",", "")) == pytest.approx(num_tokens / bar.fields["seconds"], abs=1)


def test_tokens_after_the_end_are_not_counted() -> None:
    model, progress = refusion_lit.load(MODEL), DecodingProgress(Console(file=io.StringIO()))
    rows = model.generate(PROMPTS, decoder=ReFusion(), max_new_tokens=64, callbacks=[progress.watch("a", 4)])
    assert progress.tasks[0].fields["num_tokens"] == sum(row.num_tokens for row in rows)


def test_a_decoder_with_the_name_of_another_bar_has_a_bar() -> None:
    progress = DecodingProgress(Console(file=io.StringIO()))
    steps = progress.add_bar("training", 100)
    progress.watch("training", 4)
    assert [bar.total for bar in progress.tasks] == [100, 4]
    assert steps.completed == 0


def test_generate_has_a_bar_and_a_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    output = tmp_path / "out.jsonl"
    args = ["generate", f"--ckpt_path={MODEL}", f"--prompts={tmp_path / 'prompts.txt'}", f"--output={output}"]
    assert main([*args, "--max_new_tokens=32", "--batch_size=2"]) == 0
    shown = terminal.text
    assert "ReFusion" in shown
    assert "4/4 answers" in shown
    last = shown.splitlines()[-1]
    assert last.startswith("ReFusion: 4 answers, ")
    assert last.endswith(f" tokens/s, {output}")


def test_test_names_its_decoders_and_prints_no_bar_after_the_table(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = at_terminal(monkeypatch)
    args = ["test", "--config", QUICKSTART, *TINY_TEST, f"--ckpt_path={checkpoint}", f"--runs_dir={tmp_path}"]
    assert main([*args, "--model.decoders.one=RecomputeKV"]) == 0
    shown, out = terminal.text, capsys.readouterr().out
    for name in ("refusion", "one"):
        assert f"{name} " in shown
    assert "12/12 answers" in shown
    assert "tokens/s" in shown
    assert "answers" not in out
    for leftover in ("v_num", "Epoch", "FLOPs", "GPU available", "Restoring states", "DataLoader"):
        assert leftover not in shown + out


def test_fit_shows_steps_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = at_terminal(monkeypatch)
    assert main(["fit", "--config", QUICKSTART, *TINY_WITH_BARS, f"--runs_dir={tmp_path}"]) == 0
    shown, out = terminal.text, capsys.readouterr().out
    assert "step 2/4: train/loss " in shown
    assert "step 4/4: train/loss " in shown
    assert "val/loss" in shown
    assert "trained to step 4 in 0:00:" in shown
    for leftover in ("v_num", "Epoch", "FLOPs", "GPU available", "`Trainer.fit` stopped", "Seed set to", "/-2"):
        assert leftover not in shown + out


def test_the_last_line_has_the_validation_of_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["fit", "--config", QUICKSTART, *TINY_WITH_BARS, "--trainer.max_steps=3", f"--runs_dir={tmp_path}"]) == 0
    )
    lines = capsys.readouterr().err.splitlines()
    losses = [re.search(r"train/loss [\d.e+-]+, val/loss [\d.e+-]+", line) for line in lines if "step 3" in line]
    assert len(losses) == 2
    at_step, at_end = (match[0] for match in losses if match)
    assert at_step == at_end


def test_the_bar_of_a_training_has_one_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    assert main(["fit", "--config", QUICKSTART, *TINY_WITH_BARS, f"--runs_dir={tmp_path}"]) == 0
    bars = [line for line in re.split(r"[\r\n]", terminal.text) if line.startswith("training ") and "steps/s" in line]
    assert bars
    assert not any(" left" in line for line in bars)


def test_without_a_terminal_there_are_lines_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", QUICKSTART, *TINY_WITH_BARS, f"--runs_dir={tmp_path}"]) == 0
    error = capsys.readouterr().err
    assert "step 2/4: train/loss " in error
    assert "\x1b" not in error
    assert "━" not in error


def test_a_training_without_a_loss_to_show_ends_with_a_plain_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--trainer.max_steps=1", "--trainer.log_every_n_steps=5", "--trainer.limit_val_batches=0"]
    assert main(["fit", "--config", QUICKSTART, *TINY_WITH_BARS, *few, f"--runs_dir={tmp_path}"]) == 0
    assert re.search(r"^trained to step 1 in 0:00:\d\d$", capsys.readouterr().err, re.M)


def test_other_processes_show_nothing() -> None:
    bar = TrainerProgress()
    bar.disable()
    assert bar.watch("a", 3) == []
    bar.enable()
    assert len(bar.watch("a", 3)) == 1


def test_a_warning_is_one_line_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show_warnings()
        for _ in range(2):
            warnings.warn("two\n  lines", UserWarning, stacklevel=1)
        warnings.warn("of a library", DeprecationWarning, stacklevel=1)
    assert terminal.getvalue() == "refusion-lit: \x1b[33mwarning\x1b[0m: two lines\n"


def test_only_warnings_of_lightning_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_own_logs()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.info("GPU available: False")
    logger.warning("something\nto know")
    assert capsys.readouterr().err == "refusion-lit: warning: something to know\n"
