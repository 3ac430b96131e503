"""The model card of an exported model, written from the files of its own run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from refusion_lit.reports.tables import markdown_table
from refusion_lit.types import ModelTraits
from refusion_lit.version import __version__

_DECODERS = {"bidirectional": "LLaDA", "block_causal": "BlockDiffusion"}


def model_card(name: str, traits: ModelTraits, run: Path | None, results: Sequence[Path] = ()) -> str:
    """Write a card in Markdown, with the front matter that the Hugging Face hub reads.

    Args:
        name: The directory or repository, for the loading example.
        traits: What the weights were trained to do.
        run: The training run's directory, with ``config.yaml`` and ``environment.json``; ``None`` if unknown.
        results: Directories of test runs, with ``results.json``.

    Raises:
        ValueError: If a directory lacks its file or holds something else.
    """
    config = _read(run, "config.yaml") if run is not None else {}
    environment = _read(run, "environment.json") if run is not None else {}
    parts = [_front_matter(config), f"# {Path(name).name}", _what(traits), _loading(name, traits)]
    if config:
        parts.append(_training(config))
    if results:
        parts += ["## Results", *(_results(_read(directory, "results.json")) for directory in results)]
    if environment:
        parts.append(_environment(environment))
    if config:
        shown = yaml.safe_dump(config, sort_keys=False, width=120).strip()
        parts.append(f"<details><summary>Training config</summary>\n\n```yaml\n{shown}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _read(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"model card: {path} cannot be read ({error}); give the directory of a run of refusion-lit."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"model card: expected a mapping in {path}, got {type(values).__name__}.")
    return values


def _front_matter(config: Mapping[str, Any]) -> str:
    values: dict[str, Any] = {
        "library_name": "refusion-lit",
        "pipeline_tag": "text-generation",
        "tags": ["refusion-lit", "diffusion-language-model", "parallel-decoding"],
    }
    source = _at(config, "model", "backbone", "source")
    if source and not Path(source).exists():  # a local path says nothing to a reader
        values["base_model"] = source
    return f"---\n{yaml.safe_dump(values, sort_keys=False).strip()}\n---"


def _what(traits: ModelTraits) -> str:
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


def _training(config: Mapping[str, Any]) -> str:
    rows = {
        "objective": _described(_at(config, "model", "objective")),
        "task": _described(_at(config, "data", "task")),
        "weights from": _at(config, "model", "backbone", "source") or "random initialisation",
        "optimizer": _described(_at(config, "model", "optimizer")),
        "batch": f"{_at(config, 'data', 'batch_size')} samples a process, "
        f"{_at(config, 'trainer', 'accumulate_grad_batches') or 1} batches a step",
        "length": f"{_at(config, 'trainer', 'max_steps')} steps, {_at(config, 'trainer', 'max_epochs')} epochs at most",
        "precision": _at(config, "trainer", "precision") or "32-true",
        "seed": config.get("seed_everything"),
    }
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["## Training", "", "| | |", "| --- | --- |", *lines])


def _results(results: Mapping[str, Any]) -> str:
    marked = {name for name, reasons in (results.get("mismatches") or {}).items() if reasons}
    sampling = ", ".join(f"{name} {value}" for name, value in (results.get("sampling") or {}).items() if value)
    table = markdown_table(results["results"], marked=marked)
    return f"{table}\n\nBatch size {results.get('max_batch_size')}; {sampling}."


def _environment(environment: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in (environment.get("packages") or {}).items())
    hardware = environment.get("hardware") or {}
    devices = ", ".join(hardware.get("devices") or []) or f"{hardware.get('num_cpus')} CPUs ({hardware.get('machine')})"
    git = environment.get("git") or {}
    commit = f" Commit {git.get('commit')}{' with changes' if git.get('dirty') else ''}." if git else ""
    return f"## Environment\n\nPython {environment.get('python')}; {packages}. Trained on {devices}.{commit}"


def _described(part: object) -> str:
    """Name a ``class_path`` with its options; only values that a reader can use."""
    if not isinstance(part, Mapping):
        return "default" if part is None else str(part)
    options = [f"{k}={v}" for k, v in (part.get("init_args") or {}).items() if v is not None and k != "files"]
    return f"{str(part.get('class_path')).rsplit('.', 1)[-1]}({', '.join(options)})"


def _at(config: Mapping[str, Any], *path: str) -> Any:  # noqa: ANN401 - a value of a config
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
