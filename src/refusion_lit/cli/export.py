"""``refusion-lit export``: a checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

import sys
from pathlib import Path

from refusion_lit.cli.parser import OneLineParser


def run(args: list[str]) -> int:
    """Write the directory with its model card, and upload it if asked to.

    Raises:
        ValueError: If the checkpoint cannot be read, the directory is not empty, or the upload is refused.
    """
    parser = OneLineParser(prog="refusion-lit export", description="Write a Hugging Face directory.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, directory or hub id to export")
    parser.add_argument("--output", type=str, required=True, help="new or empty directory")
    parser.add_argument("--results", type=list[str], default=[], help="directories of test runs, for the model card")
    parser.add_argument("--push_to_hub", type=str | None, default=None, help="repository to upload to, as OWNER/NAME")
    parser.add_argument("--private", type=bool, default=True, help="whether a new repository is private")
    options = parser.parse_args(args)

    from refusion_lit.checkpoints.metadata import load_model
    from refusion_lit.modeling.loading import save_directory
    from refusion_lit.reports.model_card import model_card

    backbone, tokenizer, template = load_model(options.ckpt_path)
    name = options.push_to_hub or options.output
    card = model_card(name, backbone.traits, _run_of(options.ckpt_path), [Path(path) for path in options.results])
    save_directory(backbone, tokenizer, options.output, prompt_template=template)
    (Path(options.output) / "README.md").write_text(card, encoding="utf-8")
    sys.stdout.write(f"wrote {options.output}\n")
    if options.push_to_hub:
        _upload(options.output, options.push_to_hub, private=options.private)
        sys.stdout.write(f"uploaded to {options.push_to_hub}\n")
    return 0


def _run_of(source: str) -> Path | None:
    """Return the run's directory that a checkpoint lies in, if it lies in one."""
    run = Path(source).parent.parent
    return run if source.endswith(".ckpt") and (run / "config.yaml").is_file() else None


def _upload(directory: str, repository: str, *, private: bool) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload from refusion-lit")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise ValueError(
            f"push_to_hub: the upload to {repository!r} failed ({str(error).splitlines()[0]}); {directory} is "
            "complete. "
            "Log in with `hf auth login`, check the name and the network, and upload it with `hf upload`."
        ) from error
