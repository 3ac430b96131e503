"""The model card of an exported model, generated from the files of its training and test runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.families.defaults import default_decoder
from refusion_lit.modeling.lora import Adapters
from refusion_lit.modeling.saving import has_own_decoder
from refusion_lit.reports.environment import described_environment
from refusion_lit.reports.results import RESULTS, read_config, read_environment, read_results
from refusion_lit.reports.tables import markdown_figures
from refusion_lit.types import ModelTraits
from refusion_lit.version import __version__

_PREDICTIONS = {
    "mask": "the token at each mask",
    "mask_shifted": "the token at each mask, from the position before it",
    "isolated_mask": "the token at each mask that sees no other mask",
    "visible": "the token that belongs at each visible place",
    "next_token": "the token after each token",
    "verifier": "the token after each token, by a second model",
    "next_token_in_slot": "the token after each token of a slot",
}


def model_card(
    name: str,
    traits: ModelTraits,
    run: Path | None,
    results: Sequence[Path] = (),
    *,
    adapters: Adapters | None = None,
) -> str:
    """Return a model card in Markdown, with the front matter that the Hugging Face hub reads.

    Args:
        name: Directory or repository of the model, used in the loading example.
        traits: The attention pattern and predictions that the weights were trained for.
        run: Directory of the training run, whose ``config.yaml`` and ``environment.json`` are included where they
            exist; ``None`` if it is unknown.
        results: Directories of test runs, each with a ``results.json``.
        adapters: The low-rank adapters, if the directory holds them alone.

    Raises:
        ValueError: If a file is damaged or a test run has no results.
    """
    config = (run and read_config(run)) or {}
    environment = (run and read_environment(run)) or {}
    loading = _loading(name, traits) if adapters is None else _adapter_loading(name, adapters)
    tests = [_read_test(path) for path in results]
    parts = [_front_matter(name, config, tests), f"# {Path(name).name}", _summary(traits), loading]
    if config:
        parts.append(_training(config))
    if tests:
        parts += ["## Results", *map(_results, tests)]
    if environment:
        parts.append(_table("Environment", described_environment(environment)))
    if config:
        shown = yaml.safe_dump(_without_unset(config), sort_keys=False, width=120).strip()
        parts.append(f"<details><summary>Training config</summary>\n\n```yaml\n{shown}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _front_matter(name: str, config: Mapping[str, Any], tests: Sequence[Mapping[str, Any]]) -> str:
    values: dict[str, Any] = {
        "library_name": "refusion-lit",
        "pipeline_tag": "text-generation",
        "tags": ["refusion-lit", "diffusion-language-model", "parallel-decoding"],
    }
    source = _lookup(config, "model", "backbone", "source")
    if source and not Path(source).exists():  # a local path means nothing on another machine
        values["base_model"] = source
    entries = [entry for entry in map(_index, tests) if entry["metrics"]]
    if entries:
        values["model-index"] = [{"name": Path(name).name, "results": entries}]
    return f"---\n{yaml.safe_dump(values, sort_keys=False).strip()}\n---"


def _index(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a test as an entry of the hub's ``model-index``, of the decoders that fit the model."""
    task = _lookup(test, "config", "data", "task")
    name = _class_name(task) or "unknown task"
    metrics = [
        {"type": figure, "name": f"{title} with {decoder}", "value": round(float(figures[figure]), 4)}
        for decoder, figures in test["results"].items()
        for figure, title in (("score", "score"), ("tokens_per_forward", "tokens per forward"))
        if figure in figures and not (test.get("mismatches") or {}).get(decoder)
    ]
    return {
        "task": {"type": "text-generation", "name": "Text generation"},
        "dataset": {"name": f"{name}, test split", "type": _lookup(task, "init_args", "dataset") or name},
        "metrics": metrics,
    }


def _summary(traits: ModelTraits) -> str:
    pattern = {
        "causal": "Every position sees the positions before it",
        "bidirectional": "Every position sees the whole text",
        "block_causal": f"Every position sees its own block of {traits.block_size} positions and all blocks before it",
    }[traits.attention]
    pattern += "; the prompt is one block" * traits.prompt_is_block
    predictions = " and ".join(_PREDICTIONS[name] for name in traits.predictions or ())
    predicts = f"It predicts {predictions}." if predictions else "What it predicts is not recorded."
    return f"A language model, exported by refusion-lit {__version__}. {pattern}. {predicts}"


def _loading(name: str, traits: ModelTraits) -> str:
    made: Any = default_decoder(traits)
    decoder = type(made).__name__
    changed = [(field.name, getattr(made, field.name)) for field in fields(made)]
    options = ", ".join(f"{key}={value!r}" for key, value in changed if value != getattr(type(made)(), key))
    return f"""## Loading

```python
import refusion_lit
from refusion_lit.decoding import {decoder}

model = refusion_lit.load({name!r})
print(model.generate(["..."], decoder={decoder}({options}), max_new_tokens=64)[0].text)
```

or `refusion-lit generate --ckpt_path {name} --prompt "..."`.{_in_transformers(name, traits)}"""


def _in_transformers(name: str, traits: ModelTraits) -> str:
    """Say what works without this package."""
    if traits.attention == "causal" and "next_token" in (traits.predictions or ()):
        return f"""

## Without refusion-lit

transformers' `generate` decodes it, and `lm_eval --model hf --model_args pretrained={name}` finds likelihoods."""
    if not has_own_decoder(traits):
        return ""
    return f"""

## Without refusion-lit

The directory holds its decoder in `custom_generate/generate.py`, for transformers alone: greedy, one prompt at a time.
Read it first; `trust_remote_code` runs it. `slot_size` is one that the model was trained with.

```python
{transformers_loading(name)}
model.generation_config.refusion |= {{"slot_size": 8, "slot_threshold": 0.9, "token_threshold": 0.9}}
output = model.generate(input_ids, custom_generate={name!r}, trust_remote_code=True, max_new_tokens=64)
print(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))
```

Plain `generate` is not meaningful: at the first token of a slot the model needs a mask. Likelihoods with the
lm-evaluation-harness need `refusion-lit evaluate` too, for the same reason; `lm_eval --model hf` gives wrong ones."""


def transformers_loading(name: str) -> str:
    """Return lines of Python that load a model and encode a prompt with transformers alone."""
    return f"""from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r})
input_ids = tokenizer("...", return_tensors="pt").input_ids"""


def _adapter_loading(name: str, adapters: Adapters) -> str:
    options = {"revision": adapters.revision} if adapters.revision is not None else {}
    options |= adapters.config_overrides
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    resizing = """
if len(tokenizer) > base.get_input_embeddings().num_embeddings:  # the adapters bring the rows of new tokens
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)"""
    return f"""## Loading

These are low-rank adapters for `{adapters.base}`, in peft's layout.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained({name!r})
base = AutoModelForCausalLM.from_pretrained({adapters.base!r}{arguments}){resizing if adapters.new_token_ids else ""}
model = PeftModel.from_pretrained(base, {name!r})
```

`refusion-lit generate` takes the training's checkpoint, or a directory exported without `--adapter_only`."""


def _training(config: Mapping[str, Any]) -> str:
    rows = {
        "objective": _component(_lookup(config, "model", "objective")),
        "task": _component(_lookup(config, "data", "task")),
        "weights from": _lookup(config, "model", "backbone", "source") or "random initialisation",
        "optimizer": _component(_lookup(config, "model", "optimizer")),
        "samples per batch and process": _lookup(config, "data", "batch_size"),
        "batches per optimizer step": _lookup(config, "trainer", "accumulate_grad_batches") or 1,
        "length": _length(config),
        "precision": _lookup(config, "trainer", "precision") or "32-true",
        "seed": config.get("seed_everything"),
    }
    return _table("Training", {name: value for name, value in rows.items() if value is not None})


def _length(config: Mapping[str, Any]) -> str:
    """Return the limits of a training, of which the first one that is reached ends it."""
    steps, epochs, time = (_lookup(config, "trainer", f"max_{name}") for name in ("steps", "epochs", "time"))
    parts = [f"{steps} steps"] if steps is not None and steps >= 0 else []
    if epochs is not None and epochs >= 0:
        parts.append(f"{epochs} epoch{'' if epochs == 1 else 's'}")
    if time is not None:
        parts.append(f"a time of {time}")
    elif not parts and epochs is None:
        parts.append("1000 epochs")  # Lightning's default
    return f"at most {' or '.join(parts)}" if parts else "without a limit"


def _read_test(directory: Path) -> dict[str, Any]:
    """Return the content of a test's ``results.json``."""
    path = directory / RESULTS
    results = read_results(path)
    if results is None:
        raise ValueError(
            f"results: expected the results of `refusion-lit test` in {path}, got another file; test the model again."
        )
    return results


def _results(results: Mapping[str, Any]) -> str:
    marked = {name for name, reasons in (results.get("mismatches") or {}).items() if reasons}
    sampling = {"batch_size": results.get("batch_size"), **(results.get("sampling") or {})}
    options = ", ".join(f"{name} {value}" for name, value in sampling.items() if value not in (None, []))
    num_prompts = max(int(figures.get("num_prompts", 0)) for figures in results["results"].values())
    task = _class_name(_lookup(results, "config", "data", "task"))
    prompts = f"{num_prompts} prompt{'' if num_prompts == 1 else 's'} of the test split"
    lead = f"On {prompts}{f' of {task}' if task else ''}, decoded with {options}:"
    return f"{lead}\n\n{markdown_figures(results['results'], marked=marked)}"


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| name | value |", "| --- | --- |", *lines])


def _component(part: object) -> str:
    """Return a component of a config as ``Class(option=value)``; file lists are left out."""
    if not isinstance(part, Mapping):
        return "default" if part is None else str(part)
    options = [f"{k}={v}" for k, v in (part.get("init_args") or {}).items() if v is not None and k != "files"]
    return f"{_class_name(part)}({', '.join(options)})"


def _class_name(part: object) -> str | None:
    """Return the class of a component of a config without its module; ``None`` if there is none."""
    return str(part["class_path"]).rsplit(".", 1)[-1] if isinstance(part, Mapping) and "class_path" in part else None


def _without_unset(value: Any) -> Any:  # noqa: ANN401 - YAML
    """Return a config without the options that have no value."""
    if isinstance(value, Mapping):
        return {name: _without_unset(inner) for name, inner in value.items() if inner is not None}
    return [_without_unset(inner) for inner in value] if isinstance(value, list) else value


def _lookup(config: object, *path: str) -> Any:  # noqa: ANN401 - a value of a config
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
