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

GOLDENS = Path(__file__).parents[1] / "goldens"
EOS = 1
PROGRAM = """
import json, sys, torch
sys.modules["refusion_lit"] = None  # importing it fails
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
directory, goldens, stride = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(directory).eval()
for run in goldens["runs"][::stride]:
    setting = goldens["settings"][run["setting"]]
    model.generation_config.refusion |= {
        "slot_size": setting["slot_size"], "num_serial_blocks": setting["serial_num_blocks"],
        "slot_threshold": setting["slot_threshold"], "token_threshold": setting["token_threshold"],
    }
    ids, length = torch.tensor([run["prompt"]]), setting["gen_length"]
    output = model.generate(ids, custom_generate=directory, trust_remote_code=True, max_new_tokens=length)
    print(json.dumps(output[0, len(run["prompt"]):].tolist()))
"""


@pytest.mark.parametrize("name", ["clean", "mid"])
def test_the_goldens_come_out(name: str, tmp_path: Path) -> None:
    directory, goldens, stride = tmp_path / "model", GOLDENS / f"refusion_decode_{name}.json", 5
    model = refusion_lit.load(GOLDENS / "models" / f"additions-{name}")
    model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
    save_model(model.backbone, model.tokenizer, directory)
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(directory), str(goldens), str(stride)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0, done.stderr
    runs = [run["output"] for run in json.loads(goldens.read_text())["runs"][::stride]]
    expected = [run[: [*run, EOS].index(EOS) + 1] for run in runs]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
    assert len(expected) >= 24


def test_the_cards_program_runs_with_transformers_alone(tmp_path: Path) -> None:
    model, directory = refusion_lit.load(GOLDENS / "models" / "additions-clean"), tmp_path / "model"
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
