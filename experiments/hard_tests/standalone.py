"""Do exported decoders give the reference outputs in an environment that has transformers and nothing of ours?

usage: python experiments/hard_tests/standalone.py write DIR      (exports models; needs this package)
       python experiments/hard_tests/standalone.py decode DIR     (decodes them; must not find this package)

``nox -s hard -- standalone`` runs both, and uninstalls this package in between. ReFusion's decoder is compared with the
token ids of all reference outputs in tests/goldens, the drafter's with transformers' own greedy ``generate`` on random
prompts. The result is written beside this file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
NAMES, EOS, NUM_PROMPTS = ("clean", "mid"), 1, 100
STAMP = "environment.json"


def write(directory: Path) -> None:
    """Export the two models of the reference outputs, and a random drafter for one."""
    import refusion_lit
    from refusion_lit.modeling.drafter import Drafter, DrafterOptions
    from refusion_lit.modeling.saving import save_drafter, save_model
    from refusion_lit.reports.results import environment
    from refusion_lit.types import ModelTraits

    for name in NAMES:
        model = refusion_lit.load(GOLDENS / "models" / f"additions-{name}")
        model.backbone.traits = ModelTraits(attention="causal", predictions=("mask", "next_token_in_slot"))
        save_model(model.backbone, model.tokenizer, directory / name)
    torch.manual_seed(0)
    model, options = refusion_lit.load(directory / NAMES[0]), DrafterOptions(num_masks=3, rank=2)
    drafter = Drafter(model.backbone.body, options, str(directory / NAMES[0]))
    for up in drafter.up.values():
        torch.nn.init.normal_(up, std=0.05)
    (directory / "draft").mkdir()
    save_drafter(drafter, model.backbone.body, directory / "draft", vocab_size=len(model.tokenizer))
    stamp = {name: value for name, value in environment(0, []).items() if name in ("git", "hardware")}
    (directory / STAMP).write_text(json.dumps(stamp), encoding="utf-8")


def decode(directory: Path) -> None:
    """Decode with transformers alone and compare; exit with 1 if a token differs."""
    if importlib.util.find_spec("refusion_lit") is not None:
        sys.exit("expected an environment without refusion-lit, got one with it; use `nox -s hard -- standalone`")
    counts = compared(directory)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    result = {
        "equal": {name: f"{equal} of {count}" for name, (equal, count) in counts.items()},
        "versions": versions,
        "environment": json.loads((directory / STAMP).read_text(encoding="utf-8")),
    }
    print(json.dumps(result))
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(int(any(equal < count for equal, count in counts.values())))


def compared(directory: Path, stride: int = 1) -> dict[str, tuple[int, int]]:
    """Return how many texts are equal, and how many there are; one text in ``stride`` is decoded."""
    torch.set_num_threads(1)
    counts = {f"goldens {name}": goldens(directory / name, name, stride) for name in NAMES}
    return counts | {"drafter": drafted(directory / NAMES[0], directory / "draft", NUM_PROMPTS // stride)}


def goldens(directory: Path, name: str, stride: int) -> tuple[int, int]:
    """Return how many reference outputs come out, and how many there are."""
    reference = json.loads((GOLDENS / f"refusion_decode_{name}.json").read_text(encoding="utf-8"))
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    runs, equal = reference["runs"][::stride], 0
    for run in runs:
        setting = reference["settings"][run["setting"]]
        model.generation_config.refusion |= {
            "slot_size": setting["slot_size"], "num_serial_blocks": setting["serial_num_blocks"],
            "slot_threshold": setting["slot_threshold"], "token_threshold": setting["token_threshold"],
        }  # fmt: skip
        options = {"custom_generate": str(directory), "trust_remote_code": True}
        ids = model.generate(torch.tensor([run["prompt"]]), max_new_tokens=setting["gen_length"], **options)
        expected = run["output"][: [*run["output"], EOS].index(EOS) + 1]
        equal += ids[0, len(run["prompt"]) :].tolist() == expected
    return equal, len(runs)


def drafted(base: Path, draft: Path, num_prompts: int) -> tuple[int, int]:
    """Return for how many prompts drafts leave the text as it is, and how many there are."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    model.generation_config.pad_token_id = model.config.pad_token_id
    banned = [[token] for token in (model.config.pad_token_id, model.config.mask_token_id)]
    rng, equal = random.Random(0), 0
    for _ in range(num_prompts):
        prompt = torch.tensor([[rng.randrange(4, 17) for _ in range(rng.randint(1, 12))]])
        options = {"max_new_tokens": rng.randint(1, 40), "attention_mask": torch.ones_like(prompt), "do_sample": False}
        expected = model.generate(prompt, bad_words_ids=banned, **options)
        options |= {"custom_generate": str(draft), "trust_remote_code": True, "draft": str(draft)}
        equal += torch.equal(expected, model.generate(prompt, **options))
    return equal, num_prompts


def main() -> None:
    """Write or decode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("write", "decode"))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    (write if args.part == "write" else decode)(args.directory)


if __name__ == "__main__":
    main()
