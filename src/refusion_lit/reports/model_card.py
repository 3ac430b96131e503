"""Model cards for exported models and drafters, written from their training and test runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from refusion_lit.families.defaults import changed_options, default_decoder
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.block_drafter import BlockDrafter, BlockDrafterOptions
from refusion_lit.modeling.drafter import DrafterOrigin
from refusion_lit.modeling.formats import CheckpointFormat
from refusion_lit.modeling.published import published_config
from refusion_lit.modeling.saving import PROGRAM_OPTIONS, has_own_decoder
from refusion_lit.reports.results import ENVIRONMENT, RESULTS, describe_environment, read_run_config
from refusion_lit.reports.rows import read_test
from refusion_lit.reports.tables import MISMATCH, figure_columns, format_markdown
from refusion_lit.utils.files import check_fingerprint, read_object
from refusion_lit.utils.nested import get_nested
from refusion_lit.utils.require import require
from refusion_lit.version import __version__


def model_card(
    name: str,
    backbone: Backbone,
    prompt: str,
    run: Path | None = None,
    results: Sequence[Path] = (),
    *,
    weights: str | None = None,
    published: CheckpointFormat | None = None,
) -> str:
    """Return a model card in Markdown, with the metadata that the Hugging Face hub reads.

    The card shows the decoder in the model's config, or else the decoder for the model's traits, with the tested
    options.

    Args:
        name: The model's directory or repository, for the loading example.
        backbone: The model. If it has low-rank adapters, the directory holds only the adapters.
        prompt: The result of :func:`~refusion_lit.modeling.prompt_code.prompt_code` for the tokenizer.
        run: The training run; its ``config.yaml`` and ``environment.json`` are included if they exist.
            ``None`` if the run is unknown.
        results: Test runs with a ``results.json``.
        weights: The weights' digest; results for other weights are refused. ``None`` if unknown.
        published: The directory's published format; ``None`` for transformers' format.

    Raises:
        ValueError: If a file is damaged, or a test run has no results or used other weights.
    """
    config = (run and read_run_config(run)) or {}
    tests = [_read_test(path, weights) for path in results]
    traits, has_drafter = backbone.traits, backbone.drafter is not None
    entry = getattr(backbone.config, "refusion_lit", None) or {}
    chosen = default_decoder(traits, entry.get("decoder"), drafts=has_drafter)
    if "decoder" not in entry and published is None:
        chosen = _with_tested_options(chosen, tests)
    layout = published and published.layout
    evaluated = [result for test in tests for result in _eval_results(test)]
    tags = ["refusion-lit", *([] if chosen.is_left_to_right else ["diffusion-language-model"]), "parallel-decoding"]
    options = changed_options(chosen)
    return _render(
        "model_card.md.jinja",
        name,
        tags,
        get_nested(config, "model.backbone.source"),
        evaluated,
        traits=traits,
        adapters=backbone.adapters,
        has_own_head=not getattr(backbone.config, "tie_word_embeddings", False),
        decoder=type(chosen).__name__,
        options=options,
        lacking=[f"`{name}`" for name in options if name not in (*PROGRAM_OPTIONS, "fused", "infill_layout")],
        own_options={"slot_size": 8, "slot_threshold": 0.9, "token_threshold": 0.9}
        | {name: value for name, value in options.items() if name in PROGRAM_OPTIONS},
        prompt=prompt,
        max_new_tokens=next((get_nested(test, "sampling.max_new_tokens") for test in tests), None) or 64,
        has_drafter=has_drafter,
        has_block_drafter=isinstance(backbone.drafter, BlockDrafter),
        is_autoregressive=published is None
        and (has_drafter or (traits.attention == "causal" and "next_token" in (traits.predictions or ()))),
        has_own_decoder=published is None and has_own_decoder(traits),
        published=published,
        layout=layout,
        mask_token_id=backbone.special_tokens.mask_token_id,
        published_values=published_config(backbone, published, layout) if published and layout else {},
        tests=tests,
        mismatch=MISMATCH,
        environment=describe_environment(read_object(run / ENVIRONMENT)) if run else {},
        config=yaml.safe_dump(_without_unset(config), sort_keys=False, width=120).strip() if config else "",
    )


def _with_tested_options(decoder: Any, tests: Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401 - a dataclass
    """Return a decoder with the options that were tested first for its class."""
    for test in tests:
        for options in test["decoders"].values():
            if options.get("class") == type(decoder).__name__:
                return replace(decoder, **{k: v for k, v in options.items() if hasattr(decoder, k)})
    return decoder


def drafter_card(name: str, origin: DrafterOrigin, prompt: str) -> str:
    """Return a drafter's model card in Markdown.

    Args:
        name: The directory or repository.
        origin: The drafter's options and base.
        prompt: The result of :func:`~refusion_lit.modeling.prompt_code.prompt_code` for the model's tokenizer.
    """
    base = origin.base or "MODEL"
    is_block = isinstance(origin.options, BlockDrafterOptions)
    values = {"base": base, "options": origin.options, "is_block": is_block, "prompt": prompt}
    return _render("drafter_card.md.jinja", name, ["speculative-decoding"], origin.base, [], **values)


def _render(
    template: str,
    name: str,
    tags: list[str],
    base_model: str | None,
    evaluated: list[EvalResult],
    **values: Any,  # noqa: ANN401 - what the template shows
) -> str:
    """Fill in a template.

    Args:
        template: The template's file.
        name: The directory or repository.
        tags: Tags for the hub.
        base_model: The base model. A local path is not shown on the hub, because it means nothing elsewhere.
        evaluated: Figures for the hub.
        values: The template's values.
    """
    data = ModelCardData(
        library_name="refusion-lit",
        pipeline_tag="text-generation",
        tags=tags,
        base_model=base_model if base_model and not Path(base_model).exists() else None,
        eval_results=evaluated or None,
        model_name=Path(name).name if evaluated else None,
    )
    path = str(Path(__file__).with_name(template))
    values |= {"name": name, "title": Path(name).absolute().name, "version": __version__}
    values |= {"quoted": repr, "word": shlex.quote}
    return str(ModelCard.from_template(data, template_path=path, **values))


def _eval_results(test: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Yield a test's figures for the hub's ``model-index``, without decoders that do not fit the model."""
    name = test["task"] or "unknown task"
    for decoder, figures in test["results"].items():
        for figure, title in (("score", "score"), ("tokens_per_forward", "tokens per forward")):
            if figure in figures and not test["mismatches"].get(decoder):
                yield EvalResult(
                    task_type="text-generation",
                    task_name="Text generation",
                    dataset_type=get_nested(test, "config.data.task.init_args.dataset") or name,
                    dataset_name=f"{name}, {test['tested']}",
                    metric_type=figure,
                    metric_name=f"{title} with {decoder}",
                    metric_value=round(float(figures[figure]), 4),
                )


def _read_test(directory: Path, weights: str | None) -> dict[str, Any]:
    """Read a test's ``results.json``; refuse a test with other weights."""
    rows = read_test(directory / RESULTS, [])
    expected = f"the results of `refusion-lit test` in {directory / RESULTS}"
    require(bool(rows), "results", expected, "another file", "test the model again")
    results = rows[0].results
    for fingerprint in results["fingerprints"].values():
        check_fingerprint("results", str(directory), {"weights": fingerprint.get("weights")}, {"weights": weights},
                          fix="Give the directory of a test of this checkpoint")  # fmt: skip
    names = [(f"`{row.decoder}`" + r" \*" * bool(row.mismatches),) for row in rows]
    columns = figure_columns([row.figures for row in rows], metrics=results["metrics"])
    task = str(get_nested(results, "config.data.task.class_path") or "").rpartition(".")[2]
    return {"tested": "test split", "task": task, **results, "table": format_markdown([("decoder", names), *columns])}


def _without_unset(value: Any) -> Any:  # noqa: ANN401 - YAML
    """Return a config without options whose value is missing."""
    if isinstance(value, Mapping):
        return {name: _without_unset(inner) for name, inner in value.items() if inner is not None}
    return [_without_unset(inner) for inner in value] if isinstance(value, list) else value
