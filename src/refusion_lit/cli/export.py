"""``refusion-lit export`` and ``import-gguf``: write a checkpoint or a GGUF file as a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from refusion_lit.cli.model_options import ModelParser, add_decoder_option
from refusion_lit.cli.parser import OneLineParser, as_list
from refusion_lit.decoding import Decoder, SelfSpeculative, check_model
from refusion_lit.families.defaults import NAMEABLE, changed_options, default_decoder
from refusion_lit.reports.results import CONFIG, RESULTS
from refusion_lit.utils.errors import error_reason, write_error_reason
from refusion_lit.utils.files import require_empty, write_atomically
from refusion_lit.utils.require import require, require_choice

if TYPE_CHECKING:
    from refusion_lit.modeling.formats import CheckpointFormat
    from refusion_lit.text_model import TextModel


def build_parser() -> ModelParser:
    """Return the parser of ``export``."""
    parser = ModelParser(prog="refusion-lit export", description="Write a Hugging Face directory.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, directory or hub id to export")
    parser.add_argument("--output", type=str, required=True, help="new or empty directory")
    draft = "directory of a drafter to write into the same directory as the model"
    parser.add_argument("--draft", type=str | None, default=None, help=draft)
    add_decoder_option(parser, "default decoder of the exported model; by default the decoder of the model itself")
    adapters = "write low-rank adapters (in peft's layout) or the drafter alone, without the model"
    layout = "hf, or the format of published checkpoints that other programs serve: llada, dream, sdar and others"
    parser.add_argument("--format", type=str, default="hf", help=layout)
    parser.add_argument("--adapter_only", type=bool, default=False, help=adapters)
    results = "directory of a test run, for the model card; several as [A, B]"
    parser.add_argument("--results", type=list[str] | str, default=[], help=results)
    repository = "repository to upload to, as OWNER/NAME; a new repository is private"
    parser.add_argument("--push_to_hub", type=str | None, default=None, help=repository)
    return parser


def run(args: list[str]) -> int:
    """Write the directory with its model card, and upload it with ``--push_to_hub``.

    Raises:
        ValueError: If the checkpoint cannot be read, ``--adapter_only`` finds no adapters, the model does not fit the
            format, the directory is not empty, or the upload fails.
    """
    options = build_parser().parse(args)
    output = Path(options.output)
    require_empty(output)
    for results in as_list(options.results):
        is_run = (Path(results) / RESULTS).is_file()
        require(is_run, "results", f"the directory of a test run, with {RESULTS}", results, "correct the path")
    kind = type(options.decoder)
    is_nameable = options.decoder is None or kind in NAMEABLE.values()
    expected = f"a decoder of this package: {', '.join(NAMEABLE)}"
    fix = "leave it out here, and give it to the commands that decode"
    require(is_nameable, "decoder", expected, f"{kind.__module__}.{kind.__name__}", fix)

    from refusion_lit.checkpoints.files import model_source
    from refusion_lit.modeling.block_drafter import BlockDrafter, save_block_drafter
    from refusion_lit.modeling.drafter import Drafter
    from refusion_lit.modeling.formats import FORMATS
    from refusion_lit.modeling.published import check_format, save_published
    from refusion_lit.modeling.saving import save_adapters, save_drafter, save_model, vocabulary_options

    formats = {name: published for name, published in FORMATS.items() if published.layout is not None}
    require_choice("format", options.format, ("hf", *formats))
    published = formats.get(options.format)
    is_whole = published is None or not options.adapter_only
    require(is_whole, "adapter_only", "false with --format", options.adapter_only, "drop one of them")
    options.ckpt_path = model_source(options.ckpt_path)
    model = _load_for_export(options)
    backbone = model.backbone
    if options.decoder is not None:
        name_decoder(model, options.decoder)
    if published is not None:
        check_format(backbone, published)
    card = _card(options, model, published)
    with atomic_directory(output) as directory:
        drafter = backbone.drafter
        if options.adapter_only and isinstance(drafter, BlockDrafter):
            save_block_drafter(drafter, backbone.body, directory)
            model.tokenizer.save_pretrained(directory)  # whose ids loading compares with the model's
        elif options.adapter_only and isinstance(drafter, Drafter):
            save_drafter(drafter, backbone.body, directory, **vocabulary_options(backbone.special_tokens))
        elif options.adapter_only:
            save_adapters(backbone, model.tokenizer, directory)
        elif published is not None:
            decoder: Any = model.default_decoder
            named = (type(decoder).__name__, asdict(decoder))
            entry = _own_entry(model, published, options.output)
            save_published(backbone, model.tokenizer, directory, published, decoder=named, entry=entry)
        else:
            save_model(backbone, model.tokenizer, directory, prompt_template=model.prompt_template)
        write_atomically(directory / "README.md", card)
    sys.stdout.write(f"wrote {options.output}\n")
    if options.push_to_hub:
        _upload(options.output, options.push_to_hub)
        sys.stdout.write(f"uploaded to {options.push_to_hub}\n")
    return 0


def _load_for_export(options: Namespace) -> TextModel:
    """Load the model to export, with adapters merged; with ``--adapter_only``, keep the adapters separate."""
    from refusion_lit.checkpoints.files import is_checkpoint_file
    from refusion_lit.checkpoints.models import load, load_checkpoint

    source = options.ckpt_path
    if not options.adapter_only:
        return load(source, dtype="float32", device="cpu", draft=options.draft)
    require(options.draft is None, "draft", "none with --adapter_only", options.draft, "drop one of them")
    require(options.decoder is None, "decoder", "none with --adapter_only", options.decoder, "drop one of them")
    expected = "the checkpoint of a run with model.backbone.lora, drafter or block_drafter"
    require(is_checkpoint_file(source), "adapter_only", expected, source, "give its .ckpt, or drop --adapter_only")
    return load_checkpoint(source)


def name_decoder(model: TextModel, decoder: Decoder) -> None:
    """Make a decoder the model's default in the exported config.

    Raises:
        ValueError: If the decoder does not fit the model.
    """
    backbone = model.backbone
    name = type(decoder).__name__
    check_model(backbone, decoder, fix="Name another decoder, or leave --decoder out.")
    fits = backbone.drafter is None or isinstance(decoder, SelfSpeculative)
    expected = "SelfSpeculative for a model with a drafter"
    require(fits, "decoder", expected, name, "name it, or leave the drafter out")
    stored = getattr(backbone.config, "refusion_lit", None) or {}
    entry = {"class_path": name, "init_args": changed_options(decoder)}
    backbone.config.refusion_lit = {**stored, "decoder": entry}


def _own_entry(model: TextModel, published: CheckpointFormat, output: str) -> dict[str, Any]:
    """Return the decoder and the prompt template if the published format cannot store them; loading needs both."""
    from refusion_lit.modeling.formats import find_format

    traits, decoder = model.backbone.traits, model.default_decoder
    loads_as = find_format({"model_type": published.model_type}, source=output) or published
    loaded = default_decoder(replace(traits, predictions=loads_as.predictions), loads_as.default_decoder(traits))
    entry: dict[str, Any] = {}
    name = type(decoder).__name__
    if name in NAMEABLE and (decoder != loaded or published.source_pattern):  # a directory may be renamed
        entry["decoder"] = {"class_path": name, "init_args": changed_options(decoder)}
    if model.prompt_template != "{query}":
        entry["prompt_template"] = model.prompt_template
    return entry


def _card(options: Namespace, model: TextModel, published: CheckpointFormat | None) -> str:
    """Return the model card; refuse ``--results`` from other weights."""
    from refusion_lit.checkpoints.models import load
    from refusion_lit.modeling.drafter import DrafterOrigin
    from refusion_lit.modeling.prompt_code import prompt_code
    from refusion_lit.modeling.weights import weights_digest
    from refusion_lit.reports.model_card import drafter_card, model_card

    backbone = tested = model.backbone
    prompt = prompt_code(model.tokenizer, model.prompt_template)
    name = options.push_to_hub or options.output
    if options.adapter_only and backbone.drafter is not None:
        return drafter_card(name, DrafterOrigin.from_drafter(backbone.drafter), prompt)
    run = Path(options.ckpt_path).absolute().parent.parent  # if the checkpoint was not moved
    is_run = options.ckpt_path.endswith(".ckpt") and (run / CONFIG).is_file()
    results = [Path(path) for path in as_list(options.results)]
    if results and options.adapter_only:  # a test merges adapters
        tested = load(options.ckpt_path, dtype="float32", device="cpu").backbone
    weights = weights_digest(tested) if results else None
    return model_card(name, backbone, prompt, run if is_run else None, results, weights=weights, published=published)


def _upload(directory: str, repository: str) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload from refusion-lit")
    except Exception as error:  # errors of the hub, its client library or the network
        raise ValueError(
            f"push_to_hub: the upload to {repository!r} failed ({error_reason(error)}); {directory} is complete. "
            "Log in with `hf auth login`, check the name and the network, and upload it with `hf upload`."
        ) from error


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a hidden directory to fill. It gets its name when the block ends without an error.

    After an error, the directory and the parent directories that were created for it are removed.

    Args:
        path: The directory to create, named by the option ``output``; it may exist if it is empty.

    Raises:
        ValueError: If the directory cannot be written, for lack of space or permission.
    """
    target = Path(path).resolve()
    unfinished = target.with_name(f".{target.name}.unfinished")
    missing = [parent for parent in target.parents if not parent.exists()]
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        mask = os.umask(0)  # only setting the mask returns it
        os.umask(mask)
        for file in unfinished.rglob("*"):
            if file.is_file():
                file.chmod(0o666 & ~mask)  # some libraries write files that only the owner can read
        if target.is_dir():  # it may be mounted or a process's working directory, so keep it
            for file in unfinished.iterdir():
                shutil.move(file, target)
            unfinished.rmdir()
        else:
            unfinished.replace(target)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        reason = write_error_reason(error)
        if reason is None or isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise ValueError(
            f"output: {path} cannot be written ({reason}). Make room, or choose another directory."
        ) from error


def build_gguf_parser() -> OneLineParser:
    """Return the parser of ``import-gguf``."""
    text = "Write the model of a GGUF file as a Hugging Face directory, with weights in float32."
    parser = OneLineParser(prog="refusion-lit import-gguf", description=text)
    parser.add_argument("file", type=str, help="a GGUF file of an architecture that transformers reads")
    parser.add_argument("--output", type=str, required=True, help="new or empty directory")
    return parser


def import_gguf(args: list[str]) -> int:
    """Write a GGUF file's model.

    Raises:
        ValueError: If the file cannot be read, or the directory is not empty.
    """
    options = build_gguf_parser().parse(args)
    output = Path(options.output)
    require_empty(output)

    from refusion_lit.modeling.gguf import load_gguf

    model, tokenizer = load_gguf(options.file)
    with atomic_directory(output) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    sys.stdout.write(f"wrote {output}: {type(model).__name__}, {size:.1f} million parameters\n")
    return 0
