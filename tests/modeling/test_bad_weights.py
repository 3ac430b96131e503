"""Weights that are no numbers, no floating-point numbers, stored twice or not at all are refused in one line."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import refusion_lit
from modeling.test_bad_checkpoints import ASSISTANT, NAMES, copy_model, load, no_weights, refusal, split  # noqa: F401 - fixture
from refusion_lit.checkpoints.sharded import load_sharded
from refusion_lit.modeling.backbone import get_body
from refusion_lit.modeling.drafter import Drafter, load_drafter
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.saving import save_drafter
from refusion_lit.modeling.stored_tensors import first_not_finite
from support.fakes import tiny_backbone
from support.published import MODELS

OWN = Path(__file__).parents[1] / "goldens" / "models" / "additions-clean"
FILE = "model.safetensors"
LAYOUTS = ["llada2-tiny", "sdar-tiny", "diffusion-gemma-tiny", ASSISTANT]
"""A model with fused tensors, a plain model, two models with shared weights in a checkpoint, and a drafter."""


def inner_weight(weights: dict[str, Tensor]) -> str:
    """Return the name of a weight deep inside a model."""
    return max((name for name in weights if "layers.1." in name and weights[name].ndim >= 2), key=len)


def change(path: Path, damage: Callable[[Tensor], Tensor], file: str = FILE) -> str:
    """Change a weight of a file; return the weight's name."""
    weights = load_file(path / file)
    name = inner_weight(weights)
    weights[name] = damage(weights[name]).contiguous()
    save_file(weights, path / file, {"format": "pt"})
    return name


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a weight and replaces a value in its middle."""

    def damage(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight.view(-1)[weight.numel() // 2] = value
        return weight

    return damage


def as_pickle(path: Path) -> str:
    """Store a directory's weights as ``torch.save`` does; return the file's name."""
    torch.save(load_file(path / FILE), path / "pytorch_model.bin")
    (path / FILE).unlink()
    return "pytorch_model.bin"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_is_refused(
    name: str, value: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy_model(name, tmp_path)
    weight = change(path, with_value(value))
    line = refusal(path, capfd)
    assert weight in line
    assert f"{path / FILE}: expected finite" in line


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("name", [name for name in NAMES if name != ASSISTANT])
def test_integers_are_refused_before_weights_are_read(
    name: str, dtype: torch.dtype, tmp_path: Path, no_weights: None  # noqa: F811 - the fixture
) -> None:  # fmt: skip
    path = copy_model(name, tmp_path)
    weight = change(path, lambda weight: weight.to(dtype))
    with pytest.raises(ValueError, match="expected floating-point numbers") as info:
        refusion_lit.load(path)
    assert f"{path / FILE}: " in str(info.value)
    assert weight in str(info.value)
    assert "\n" not in str(info.value)


def test_integers_in_an_assistant_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy_model(ASSISTANT, tmp_path)
    weight = change(path, lambda weight: weight.int())
    assert f"floating-point numbers in {weight}" in refusal(path, capfd)


@pytest.mark.parametrize("name", ["wedlm-tiny", "llada2-tiny", "additions-clean"])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [(with_value(float("nan")), "finite weights"), (lambda weight: weight.to(torch.int8), "floating-point numbers")],
    ids=["not a number", "integers"],
)
def test_a_pickled_file_is_checked_too(
    name: str, damage: Callable[[Tensor], Tensor], expected: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    shutil.copytree(MODELS.get(name, OWN), path)
    whole = tmp_path / "whole"
    shutil.copytree(path, whole)
    as_pickle(whole)
    assert torch.equal(load(whole).backbone.head.weight, load(path).backbone.head.weight)
    weight = change(path, damage)
    file = as_pickle(path)
    assert f"{path / file}: expected {expected} in {weight}" in refusal(path, capfd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_type_of_floating_point_numbers_is_read_and_checked(
    stored: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(OWN, path)
    change(path, lambda weight: weight.to(stored))
    refusion_lit.load(path, dtype=dtype)
    change(path, with_value(float("inf")))
    with pytest.raises(ValueError, match="expected finite weights"):
        refusion_lit.load(path, dtype=dtype)


def test_a_value_that_overflows_in_the_chosen_type_is_refused_with_another_type(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(OWN, path)
    change(path, with_value(1e5))
    refusion_lit.load(path, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"range of float16 .* bfloat16 or float32"):
        refusion_lit.load(path, dtype="float16")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_values_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    finite = torch.full((3, 1000), 0.75 * torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    assert first_not_finite([("w", finite), ("empty", finite[:0]), ("whole", finite.int())]) is None
    for values in ([float("nan")], [float("inf")], [float("inf"), float("-inf")]):
        weight = finite.clone()
        weight[1, : len(values)] = torch.tensor(values).to(dtype)
        assert first_not_finite([("small", finite[:1, :1]), ("w", weight.T)]) == "w"


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_masks_that_old_checkpoints_store_may_be_booleans(file: str, tmp_path: Path) -> None:
    """Early GPT-2 directories hold their causal masks, which transformers ignores."""
    config = GPT2Config(vocab_size=19, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=1, bos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(OWN / name, tmp_path)
    weights = load_file(tmp_path / FILE)
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    if file != FILE:
        as_pickle(tmp_path)
    assert refusion_lit.load(tmp_path).backbone.config.n_layer == 2
    weights["transformer.h.0.attn.c_attn.weight"] = weights["transformer.h.0.attn.c_attn.weight"].to(torch.uint8)
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"floating-point numbers in transformer\.h\.0\.attn\.c_attn\.weight"):
        refusion_lit.load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(with_value(float("nan")), "expected finite"), (lambda weight: weight.to(torch.int8), "floating-point numbers")],
    ids=["not a number", "integers"],
)
def test_a_drafter_is_checked_too(damage: Callable[[Tensor], Tensor], expected: str, tmp_path: Path) -> None:
    model = tiny_backbone()
    assert isinstance(model.drafter, Drafter)
    save_drafter(model.drafter, get_body(model.model), tmp_path, vocab_size=8)
    load_drafter(get_body(model.model), tmp_path)
    weights = load_file(tmp_path / "drafter.safetensors")
    save_file({**weights, "masks": damage(weights["masks"])}, tmp_path / "drafter.safetensors")
    with pytest.raises(ValueError, match=f"{expected}.* in masks"):
        load_drafter(get_body(model.model), tmp_path)


# Shards.


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_in_two_shards_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy_model(name, tmp_path)
    files = split(path)
    weight = inner_weight(load_file(MODELS[name] / FILE))
    other = next(file for file in sorted(files.values()) if file != files[weight])
    weights = load_file(path / other)
    save_file({**weights, weight: load_file(path / files[weight])[weight] + 1}, path / other, {"format": "pt"})
    line = refusal(path, capfd)
    assert weight in line
    assert other in line
    assert files[weight] in line


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_index_that_names_a_tensor_no_shard_holds_is_refused(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy_model(name, tmp_path)
    files = split(path)
    weight = inner_weight(load_file(MODELS[name] / FILE))
    weights = load_file(path / files[weight])
    del weights[weight]
    save_file(weights, path / files[weight], {"format": "pt"})
    assert f"expected {weight} in {files[weight]}" in refusal(path, capfd)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_truncated_shard_is_named(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy_model(name, tmp_path)
    split(path)
    file = path / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    line = refusal(path, capfd)
    assert str(file) in line
    assert "fetch" in line


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_value_in_a_shard_is_found(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy_model(name, tmp_path)
    files = split(path)
    weight = inner_weight(load_file(MODELS[name] / FILE))
    shard = load_file(path / files[weight])
    shard[weight] = with_value(float("nan"))(shard[weight])
    save_file(shard, path / files[weight], {"format": "pt"})
    assert f"{path / files[weight]}: expected finite weights in {weight}" in refusal(path, capfd)


def test_a_name_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    """A safetensors file is the header's length in 8 bytes, the header in JSON, and the tensors' bytes."""
    path = tmp_path / "model"
    shutil.copytree(OWN, path)
    file = (path / FILE).read_bytes()
    header_size = int.from_bytes(file[:8], "little")
    header, tensors = file[8 : 8 + header_size].decode().rstrip(), file[8 + header_size :]
    entry = json.loads(header)["model.norm.weight"]
    start, stop = entry["data_offsets"]
    entry["data_offsets"] = [len(tensors), len(tensors) + stop - start]
    second = f'"model.norm.weight":{json.dumps(entry)}'
    header = f"{header.removesuffix('}')},{second}}}".encode()
    zeros = bytes(stop - start)
    (path / FILE).write_bytes(len(header).to_bytes(8, "little") + header + tensors + zeros)
    with pytest.raises(ValueError, match=r"model\.safetensors.* fetch them again"):
        refusion_lit.load(path)


# Shapes.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [lambda weight: weight.mT, lambda weight: weight[:0]], ids=["transposed", "empty"])
def test_transposed_and_empty_weights_are_refused(
    name: str, damage: Callable[[Tensor], Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy_model(name, tmp_path)
    weights = load_file(path / FILE)
    names = [weight for weight in weights if "layers.1." in weight and weights[weight].ndim == 2]
    weight = next(weight for weight in names if len({*weights[weight].shape}) == 2)
    save_file({**weights, weight: damage(weights[weight]).contiguous()}, path / FILE, {"format": "pt"})
    assert weight in refusal(path, capfd)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(with_value(float("nan")), "finite weights"), (lambda weight: weight.to(torch.int8), "floating-point numbers")],
    ids=["not a number", "integers"],
)
def test_a_model_in_the_hubs_cache_is_checked(
    damage: Callable[[Tensor], Tensor], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's files are known only after transformers has found them."""
    folder = tmp_path / "models--some--model" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(OWN, folder)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text(folder.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        monkeypatch.setattr(f"{module.__name__}.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = BackboneConfig(source="some/model")
    tokenizer = refusion_lit.load(OWN).tokenizer
    config.build(tokenizer)
    weight = change(folder, damage)
    with pytest.raises(ValueError, match=f"{FILE}: expected {expected} in {weight}"):
        config.build(tokenizer)


# Checkpoints of trainings with sharded weights.


def test_integers_in_a_sharded_checkpoint_are_refused(tmp_path: Path) -> None:
    stored = {"model.norm": torch.ones(4, dtype=torch.int32), "model.head": torch.ones(4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that there is one process
        distributed_checkpoint.save({"state_dict": stored}, checkpoint_id=str(tmp_path), no_dist=True)
    wanted = {"model.head": torch.zeros(4)}
    load_sharded(tmp_path, wanted)
    assert wanted["model.head"].sum() == 4
    with pytest.raises(ValueError, match=r"model\.norm .*torch\.int32"):
        load_sharded(tmp_path, {"model.norm": torch.zeros(4)})
