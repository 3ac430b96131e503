"""An exported model decodes with transformers alone, in a process that never imports this package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import refusion_lit
from refusion_lit.decoding import ReFusion
from refusion_lit.modeling.saving import save_model
from refusion_lit.reports.model_card import model_card
from refusion_lit.types import ModelTraits

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "experiments" / "hard_tests"
PROGRAM = """
import json, sys
from pathlib import Path
sys.modules["refusion_lit"] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
import standalone
print(json.dumps(standalone.compared(Path(sys.argv[2]), stride=5)))
"""


def test_reference_outputs_and_drafted_texts_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import standalone  # pyright: ignore[reportMissingImports]

    sys.modules.pop("standalone")
    standalone.write(tmp_path)
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(PROGRAMS), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"goldens clean": [24, 24], "goldens mid": [25, 25], "drafter": [20, 20]}


def test_the_cards_program_runs_with_transformers_alone(tmp_path: Path) -> None:
    model, directory = refusion_lit.load(ROOT / "tests" / "goldens" / "models" / "additions-clean"), tmp_path / "model"
    model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    save_model(model.backbone, model.tokenizer, directory)
    card, query = model_card(str(directory), model.backbone.traits, None), "12+34,56+78>"
    (program,) = re.findall(r"```python\n(from transformers .*?)```", card, re.DOTALL)
    program = "import sys\nsys.modules['refusion_lit'] = None\n" + program.replace("...", query)
    environment = {"HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    decoder = ReFusion(slot_size=8, slot_threshold=0.9, token_threshold=0.9)
    expected = model.generate([query], decoder=decoder, max_new_tokens=64)[0].text
    assert "".join(done.stdout.split()) == expected, done.stderr
