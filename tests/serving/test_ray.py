"""The examples for Ray on a local cluster: actors that decode a file, and replicas of the server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs ray: pip install 'ray[data,serve]'", allow_module_level=True)
pytest.importorskip("openai", reason="needs openai: pip install --group test")

from refusion_lit import load
from support.servers import MODEL

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAM = Path(__file__).parents[1] / "support" / "ray_program.py"
NUM_PROMPTS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a program on a cluster of two workers has left; it runs apart, as Ray's own warnings are not ours."""
    folder = tmp_path_factory.mktemp("ray")
    lines = [json.dumps({"id": i, "prompt": f"{i}+1="}) for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = Path(__file__).parents[2] / "src"
    paths = os.pathsep.join([str(source), str(EXAMPLES), str(PROGRAM.parent)])
    # The first start of Ray's agents takes longer than the default allows on a busy machine.
    environment = {"PYTHONPATH": paths, "RAY_raylet_start_wait_time_s": "45", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(PROGRAM), str(MODEL), str(folder)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    files = sorted((folder / name).glob("*.json"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_killed_actor_loses_nothing_and_an_interrupted_run_resumes(folder: Path) -> None:
    model = load(MODEL, device="cpu")
    rows = model.generate([f"{i}+1=" for i in range(NUM_PROMPTS)], max_new_tokens=64)
    expected = [{"id": i, "text": row.text, "forwards": row.num_forwards} for i, row in enumerate(rows)]
    answers = read(folder / "output", "answers")
    assert [{name: row[name] for name in ("id", "text", "forwards")} for row in answers] == expected, "in order"
    assert (folder / "killed").exists()
    interrupted = json.loads((folder / "interrupted.json").read_text())
    assert 0 < len(interrupted["first_run"]) < NUM_PROMPTS
    decoded = interrupted["first_run"] + interrupted["second_run"]
    assert sorted(decoded) == list(range(NUM_PROMPTS)), "a prompt was left out or decoded twice"


def test_replicas_give_the_answers_of_one_server(folder: Path) -> None:
    model = load(MODEL, device="cpu")
    served = json.loads((folder / "served.json").read_text())
    assert served["replicas"] == {"RUNNING": 2}
    texts = [row.text for row in model.generate([f"{i}+1=" for i in range(16)], max_new_tokens=24)]
    assert served["streamed"] == served["texts"] == texts
