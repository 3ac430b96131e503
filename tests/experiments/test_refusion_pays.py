"""Training on recorded states shows what the decoder had accepted, and asks for what it accepted next."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from experiments.refusion_pays import levers
from experiments.refusion_pays.recorded import RecordedStates, read_states, write_states
from experiments.refusion_pays.soft import SoftWindows, teacher_columns

from refusion_lit.contrib.rl import Trajectory, TrajectoryRecorder
from refusion_lit.decoding import ReFusion, decode
from refusion_lit.learning.batch import IGNORE_INDEX, CorruptedBatch, ResponseBatch
from refusion_lit.learning.packing import pack
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import MaskWindows
from refusion_lit.types import Prompt, SamplingParams
from support.fakes import EOS, MASK, SPECIAL, OracleModel

SIZE, PROMPT, LENGTH = 2, (3, 4, 6), 12


@pytest.fixture
def recorded(tmp_path: Path) -> Trajectory:
    """A decode in two serial blocks of three slots, of which the later ones of a block are more certain."""
    certainties = [0.5, 0.6, 0.7, 0.55, 0.65, 0.75]
    model = OracleModel(
        lambda position: 3 + position % 2 if position < len(PROMPT) + LENGTH - 1 else EOS,
        certainty=lambda position: certainties[max(position - len(PROMPT), 0) // SIZE % 6],
    )
    decoder = ReFusion(slot_size=SIZE, num_serial_blocks=2, slot_threshold=1.0, infill="autoregressive")
    recorder = TrajectoryRecorder(decoder)
    prompts = [Prompt(token_ids=PROMPT, id="a")]
    decode(model, decoder, prompts, SamplingParams(max_new_tokens=LENGTH), callbacks=[recorder])
    write_states(tmp_path / "record", [recorder.trajectories[0]])
    return read_states(str(tmp_path / "record"))["a"]


def corrupt(recorded: Trajectory, record: Path, key: int, window: int) -> CorruptedBatch:
    text = [*PROMPT, *recorded.tokens[: recorded.num_tokens].tolist()]
    lengths = torch.tensor([len(PROMPT)]), torch.tensor([recorded.num_tokens])
    batch = ResponseBatch(
        input_ids=torch.tensor([text]), prompt_lengths=lengths[0], response_lengths=lengths[1],
        sample_keys=torch.tensor([key]), ids=["a"],
    )  # fmt: skip
    objective = RecordedStates(slot_sizes=(SIZE,), record=str(record), window=window)
    return objective.corrupt(batch, KeyedNoise(batch.sample_keys), SPECIAL)


@pytest.mark.parametrize("window", [1, 2])
def test_a_sample_shows_a_state_of_its_decode(recorded: Trajectory, tmp_path: Path, window: int) -> None:
    by_acceptance = sorted(range(LENGTH // SIZE), key=lambda slot: recorded.order[slot * SIZE])
    assert by_acceptance == [2, 1, 0, 5, 4, 3]  # one slot per round, the most confident one of the block
    states = set()
    for key in range(60):
        sample = corrupt(recorded, tmp_path / "record", key, window)
        real = sample.is_real[0]  # type: ignore[index]
        positions = sample.position_ids[0][real].tolist()
        masks = sample.input_ids[0][real] == MASK
        num_accepted = int((~masks).sum() - len(PROMPT)) // SIZE
        states.add(num_accepted)
        block = range(3 * (num_accepted // 3), 3 * (num_accepted // 3) + 3)
        waiting = [slot for slot in block if slot not in by_acceptance[:num_accepted]]
        slots = [*by_acceptance[:num_accepted], *waiting]
        places = [slot * SIZE + offset for slot in slots for offset in range(SIZE)]
        assert positions == [*range(len(PROMPT)), *(len(PROMPT) + place for place in places)]
        is_asked = masks & (sample.labels[0][real] != IGNORE_INDEX)
        asked_slots = {(position - len(PROMPT)) // SIZE for position in sample.position_ids[0][real][is_asked].tolist()}
        assert asked_slots == set(by_acceptance[num_accepted : num_accepted + window]) & set(block)
        is_mask_term = (sample.terms[0] == 1) & (sample.labels[0] != IGNORE_INDEX)
        assert float(sample.weights[0][is_mask_term].sum()) == pytest.approx(1.0)  # the mean over a sample's targets
    assert states == set(range(6))


def test_a_sample_without_a_decode_is_refused(recorded: Trajectory, tmp_path: Path) -> None:
    assert recorded.num_tokens == LENGTH
    batch = ResponseBatch(
        input_ids=torch.tensor([[3, 4, 5]]), prompt_lengths=torch.tensor([1]), response_lengths=torch.tensor([2]),
        sample_keys=torch.tensor([0]), ids=["a"],
    )  # fmt: skip
    objective = RecordedStates(slot_sizes=(SIZE,), record=str(tmp_path / "record"))
    with pytest.raises(ValueError, match=r"objective\.record: expected a decode of a, got 'one of 12 tokens for 2'"):
        objective.corrupt(batch, KeyedNoise(batch.sample_keys), SPECIAL)


def windows(objective: MaskWindows) -> CorruptedBatch:
    """Two texts in windows, one after the other in one row."""
    lengths = torch.tensor([2, 3]), torch.tensor([6, 4])
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10], [4, 6, 8, 3, 5, 7, 9, 0]])
    keys = torch.tensor([1, 2])
    batch = ResponseBatch(
        input_ids=ids, prompt_lengths=lengths[0], response_lengths=lengths[1], sample_keys=keys, ids=["a", "b"]
    )
    return pack(objective.corrupt(batch, KeyedNoise(keys), SPECIAL), torch.tensor([0, 0]), pad_token_id=0)


def test_a_mask_is_taught_by_the_text_before_its_place() -> None:
    soft, hard = SoftWindows(window=3), MaskWindows(window=3)
    corrupted = windows(soft)
    is_mask = corrupted.input_ids == MASK
    teachers = teacher_columns(corrupted)[is_mask]
    assert (corrupted.input_ids.flatten()[teachers + 1] == corrupted.labels[is_mask]).all()
    assert is_mask.sum() == 2 * (6 + 4)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*corrupted.input_ids.shape, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(8, 12, dtype=torch.float64)
    expected = hard.loss(hidden, head, corrupted).sums
    torch.testing.assert_close(SoftWindows(window=3, soft_share=0.0).loss(hidden, head, corrupted).sums, expected)
    logits = head(hidden.flatten(0, 1))
    losses = [
        torch.nn.functional.cross_entropy(logits[column], logits[teacher].softmax(-1)) * weight
        for column, teacher, weight in zip(
            is_mask.flatten().nonzero()[:, 0], teachers, corrupted.weights[is_mask], strict=True
        )
    ]
    sums = SoftWindows(window=3, soft_share=1.0).loss(hidden, head, corrupted).sums
    torch.testing.assert_close(sums, torch.stack((expected[0], sum(losses, torch.zeros(()).double()))))
    (gradient,) = torch.autograd.grad(sums[1], hidden)
    assert not gradient[~is_mask].any()  # the text teaches, and does not learn from the masks
    assert gradient[is_mask].any()


def test_recipes_that_are_not_asked_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "levers.json"
    hybrid, soft, windows = "own answers, Hybrid", "own answers, SoftWindows", "own answers, windows of 4"
    output.write_text(json.dumps({"num_questions": 448, "recipes": {hybrid: 1, soft: 2, windows: 3}}))
    monkeypatch.setattr(levers, "answer", lambda *args: None)
    monkeypatch.setattr(levers, "human_answers", lambda *args: None)
    monkeypatch.setattr(levers, "kept", lambda *args: 4)
    options = ["--questions=q", "--prompts=p", f"--work_dir={tmp_path}", f"--output={output}", "--only", soft]
    monkeypatch.setattr(sys, "argv", ["levers.py", *options])
    levers.main()
    assert list(json.loads(output.read_text())["recipes"].items()) == [(hybrid, 1), (soft, 4), (windows, 3)]
