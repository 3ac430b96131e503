"""An exported model decodes with transformers alone, in a process that never imports this package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import refusion_lit
from refusion_lit.decoding import ReFusion
from refusion_lit.families.speculative import export as self_speculative
from refusion_lit.modeling.saving import save_model
from refusion_lit.refusion import export as refusion
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
print(json.dumps(standalone.compared(Path(sys.argv[2]), stride=10)))
"""


def test_reference_outputs_and_drafted_texts_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import standalone  # pyright: ignore[reportMissingImports]

    sys.modules.pop("standalone")
    standalone.write(tmp_path)
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(PROGRAMS), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={"HF_HOME": str(tmp_path / "hf")})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"goldens clean": [12, 12], "goldens mid": [13, 13], "drafter": [10, 10]}


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.7}, "temperature: expected none, got 0.7: this decoder is greedy; leave it out"),
        ({"do_sample": True}, "do_sample: expected none, got True"),
        ({"num_beams": 3}, "num_beams: expected none, got 3"),
        ({"stop_strings": ["a"]}, "stop_strings: expected none"),
        ({"slot_sizes": 4}, "slot_sizes: expected none"),
        ({"streamer": print}, "streamer: expected none"),
        ({"attention_mask": torch.tensor([[0, 1]])}, "attention_mask: expected ones, got zeros"),
        ({"max_new_tokens": 600}, "max_new_tokens: expected at most 510, got 600"),
        ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "input_ids: expected one prompt"),
        ({"inputs": torch.zeros(2, 3, dtype=torch.long)}, "input_ids: expected one prompt"),
    ],
)
@pytest.mark.parametrize("decoder", [refusion, self_speculative])
def test_what_an_exported_decoder_would_ignore_is_refused(
    decoder: ModuleType, change: dict[str, Any], message: str
) -> None:
    library = refusion_lit.load(ROOT / "tests" / "goldens" / "models" / "additions-clean").backbone.model
    own = {"draft": "nowhere"} if decoder is self_speculative else {}
    options = {"inputs": torch.tensor([[4, 5]]), "max_new_tokens": 8, "num_beams": 1, "do_sample": False, **own}
    with pytest.raises(ValueError, match=f"^{message}"):
        decoder.generate(library, **{**options, **change})


@pytest.mark.parametrize("options", [{"slot_size": 0}, {"num_serial_blocks": 0}, {"slot_sizes": 4}])
def test_wrong_options_of_an_exported_decoder_are_refused(options: dict[str, int]) -> None:
    library = refusion_lit.load(ROOT / "tests" / "goldens" / "models" / "additions-clean").backbone.model
    library.generation_config.refusion = options
    with pytest.raises(ValueError, match=r"^refusion: expected slot_size, num_serial_blocks, slot_threshold, token_"):
        refusion.generate(library, torch.tensor([[4, 5]]), max_new_tokens=8)
