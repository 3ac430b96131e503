"""The model card of an exported model, generated from the files of its training and test runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.modeling.lora import Adapters
from refusion_lit.reports.environment import described_environment
from refusion_lit.reports.results import RESULTS, read_config, read_environment, read_results
from refusion_lit.reports.tables import markdown_figures
from refusion_lit.types import ModelTraits
from refusion_lit.version import __version__

_DECODERS = {"bidirectional": "LLaDA", "block_causal": "BlockDiffusion"}


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
    parts = [_front_matter(config), f"# {Path(name).name}", _summary(traits), loading]
    if config:
        parts.append(_training(config))
    if results:
        parts += ["## Results", *map(_results, results)]
    if environment:
        parts.append(_table("Environment", described_environment(environment)))
    if config:
        shown = yaml.safe_dump(config, sort_keys=False, width=120).strip()
        parts.append(f"<details><summary>Training config</summary>\n\n```yaml\n{shown}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _front_matter(config: Mapping[str, Any]) -> str:
    values: dict[str, Any] = {
        "library_name": "refusion-lit",
        "pipeline_tag": "text-generation",
        "tags": ["refusion-lit", "diffusion-language-model", "parallel-decoding"],
    }
    source = _lookup(config, "model", "backbone", "source")
    if source and not Path(source).exists():  # a local path means nothing on another machine
        values["base_model"] = source
    return f"---\n{yaml.safe_dump(values, sort_keys=False).strip()}\n---"


def _summary(traits: ModelTraits) -> str:
    block = f" in blocks of {traits.block_size}" if traits.block_size else ""
    predictions = ", ".join(f"`{name}`" for name in traits.predictions or ()) or "unknown"
    return (
        f"A language model for parallel decoding, written by refusion-lit {__version__}. Attention: "
        f"{traits.attention.replace('_', '-')}{block}. Its logits predict: {predictions}."
    )


def _loading(name: str, traits: ModelTraits) -> str:
    decoder = "ReFusion"
    if traits.attention != "causal":
        decoder = _DECODERS[traits.attention]
    elif traits.predictions is not None and "mask" not in traits.predictions:
        decoder = "Autoregressive"
    options = f"block_size={traits.block_size}" if decoder == "BlockDiffusion" else ""
    return f"""## Loading

```python
import refusion_lit
from refusion_lit.decoding import {decoder}

model = refusion_lit.load({name!r})
print(model.generate(["..."], decoder={decoder}({options}), max_new_tokens=64)[0].text)
```

or `refusion-lit generate --ckpt_path {name} --decoder {decoder} --prompt "..."`."""


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
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
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
        "batch": f"{_lookup(config, 'data', 'batch_size')} samples per process, "
        f"{_lookup(config, 'trainer', 'accumulate_grad_batches') or 1} batches per optimizer step",
        "length": f"at most {_lookup(config, 'trainer', 'max_steps')} steps and "
        f"{_lookup(config, 'trainer', 'max_epochs')} epochs",
        "precision": _lookup(config, "trainer", "precision") or "32-true",
        "seed": config.get("seed_everything"),
    }
    return _table("Training", rows)


def _results(directory: Path) -> str:
    path = directory / RESULTS
    results = read_results(path)
    if results is None:
        raise ValueError(f"results: expected the results of `refusion-lit test` in {path}, got another file.")
    marked = {name for name, reasons in (results.get("mismatches") or {}).items() if reasons}
    sampling = ", ".join(f"{name} {value}" for name, value in (results.get("sampling") or {}).items() if value)
    return (
        f"{markdown_figures(results['results'], marked=marked)}\n\nBatch size {results.get('batch_size')}; {sampling}."
    )


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *lines])


def _component(part: object) -> str:
    """Return a component of a config as ``Class(option=value)``; file lists are left out."""
    if not isinstance(part, Mapping):
        return "default" if part is None else str(part)
    options = [f"{k}={v}" for k, v in (part.get("init_args") or {}).items() if v is not None and k != "files"]
    return f"{str(part.get('class_path')).rsplit('.', 1)[-1]}({', '.join(options)})"


def _lookup(config: Mapping[str, Any], *path: str) -> Any:  # noqa: ANN401 - a value of a config
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
