"""UniformDiffusion against transformers' own class on random models; training and loading DiffusionGemma."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as library
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

import refusion_lit
from refusion_lit.cli import main
from refusion_lit.data.tokenizers import PretrainedTokenizer
from refusion_lit.decoding import Branch, Draw, Forward, UniformDiffusion, decode
from refusion_lit.engine.batch import Batch
from refusion_lit.learning.batch import ResponseBatch
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from refusion_lit.modeling.load import BackboneConfig
from refusion_lit.modeling.lora import LoraOptions
from refusion_lit.modeling.saving import save_model
from refusion_lit.noise import KeyedNoise
from refusion_lit.objectives import UniformBlock
from refusion_lit.types import ModelTraits, Prompt, SamplingParams, SpecialTokens
from support.published import MODELS
from support.replayed_canvas import DRAWS, Draws, Replayed

SPECIAL = SpecialTokens(mask_token_id=None, eos_token_ids=(1,), pad_token_id=0, vocab_size=37, draws_padding=True)
SETTINGS: list[dict[str, Any]] = [  # options of the decoder, which transformers' generation config names alike
    {"t_min": 0.4, "t_max": 0.8, "entropy_bound": 0.1, "stability_threshold": 1, "confidence_threshold": 0.5},
    {"t_min": 0.1, "t_max": 2.0, "entropy_bound": 2.0, "stability_threshold": 0, "confidence_threshold": 1.0},
    {"t_min": 0.2, "t_max": 0.3, "entropy_bound": 0.5, "stability_threshold": 2, "confidence_threshold": 2.0},
]
CHECKPOINT = MODELS["diffusion-gemma-tiny"]


def random_config(window: int, canvas_length: int, layer_types: list[str], num_global_heads: int) -> Any:
    """Return the config of a tiny DiffusionGemma; all sizes differ from the sizes of the golden checkpoint."""
    text = {
        "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "num_global_key_value_heads": num_global_heads, "num_experts": 3, "top_k_experts": 2,
        "moe_intermediate_size": 12, "sliding_window": window, "layer_types": layer_types, "initializer_range": 0.4,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "final_logit_softcapping": 5.0,
    }  # fmt: skip
    vision = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1,
              "head_dim": 8, "intermediate_size": 8, "patch_size": 4, "position_embedding_size": 4}  # fmt: skip
    return AutoConfig.for_model(
        "diffusion_gemma", text_config=text, vision_config={"model_type": "gemma4_vision", **vision},
        canvas_length=canvas_length,
    )  # fmt: skip


def make_two_models(config: Any) -> tuple[Any, Backbone]:
    """Return transformers' model and our backbone, with the same random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        options = {"dtype": torch.float64, "attn_implementation": "sdpa", "experts_implementation": "eager"}
        theirs = library.DiffusionGemmaForBlockDiffusion._from_config(config, **options).eval()
        for parameter in theirs.parameters():
            if parameter.ndim == 1:  # norms and scales
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        for name, buffer in theirs.named_buffers():
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
        ours = DiffusionGemmaForBlockDiffusion._from_config(config, **options).eval()
    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[name] for name in ours.state_dict()})
    return theirs, Backbone(ours, ModelTraits(predictions=("visible",)), SPECIAL)


def generate_and_record(theirs: Any, ids: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Generate with transformers.

    Returns:
        The text; the random canvases, first and renoised, in the order in which they were drawn; the sampled canvases;
        and the canvases that were fed.
    """
    noise: list[list[int]] = []
    sampled: list[list[int]] = []
    canvases: list[list[int]] = []
    randint, multinomial = torch.randint, torch.multinomial

    def record_randint(*args: Any, **kwargs: Any) -> torch.Tensor:
        noise.append((drawn := randint(*args, **kwargs))[0].tolist())
        return drawn

    def record_multinomial(*args: Any, **kwargs: Any) -> torch.Tensor:
        sampled.append((drawn := multinomial(*args, **kwargs))[:, 0].tolist())
        return drawn

    decoder = theirs.model.decoder
    hook = decoder.register_forward_pre_hook(
        lambda _, __, kwargs: canvases.append(kwargs["decoder_input_ids"][0].tolist()), with_kwargs=True
    )
    with monkeypatch.context() as patch, torch.random.fork_rng():
        torch.manual_seed(len(ids))
        patch.setattr(torch, "randint", record_randint)
        patch.setattr(torch, "multinomial", record_multinomial)
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)  # loads compilers
        output = theirs.generate(torch.tensor([ids]), generation_config=make_generation_config(options))
    hook.remove()
    return output.sequences[0, len(ids) :].tolist(), noise, sampled, canvases


def make_generation_config(options: dict[str, Any]) -> Any:
    """Return transformers' generation config for options of our decoder."""
    rest = {name: value for name, value in options.items() if name not in ("entropy_bound", "num_steps")}
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": options["entropy_bound"]}
    return DiffusionGemmaGenerationConfig(
        **rest, sampler_config=sampler, max_denoising_steps=options["num_steps"], eos_token_id=[1], pad_token_id=0
    )


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize(
    ("window", "canvas_length", "layer_types", "num_global_heads"),
    [
        (4, 7, ["sliding_attention", "full_attention"], 2),
        (9, 3, ["full_attention", "sliding_attention", "sliding_attention", "full_attention"], 1),
        (2, 12, ["sliding_attention", "full_attention"], 4),
    ],
)
def test_every_canvas_equals_transformers(
    options: dict[str, Any], window: int, canvas_length: int, layer_types: list[str], num_global_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Our decoder, given transformers' random draws, feeds the same canvases and gives the same text.

    Prompts are shorter and longer than the window. transformers decodes them one at a time, our engine in a batch.
    """
    theirs, ours = make_two_models(random_config(window, canvas_length, layer_types, num_global_heads))
    prompts = [[2, *range(3, 3 + length)] for length in (1, 6, 29)]
    options = {**options, "num_steps": 4}
    limit = 2 * canvas_length
    recorded = [generate_and_record(theirs, ids, {**options, "max_new_tokens": limit}, monkeypatch) for ids in prompts]
    for i, (_, noise, sampled, _) in enumerate(recorded):
        DRAWS[str(i)] = Draws(iter(noise), iter(sampled))
    given = [Prompt(token_ids=tuple(ids), id=str(i)) for i, ids in enumerate(prompts)]
    decoder = Replayed(canvas_length=canvas_length, **options)
    rows = decode(ours, decoder, given, SamplingParams(max_new_tokens=limit), batch_size=3).rows
    for i, (row, (text, _, _, canvases)) in enumerate(zip(rows, recorded, strict=True)):
        assert [step.canvas_before for step in DRAWS[str(i)].steps] == canvases
        end = text.index(1) + 1 if 1 in text else len(text)
        assert row.token_ids == text[:end]
        num_stored = ceil(end / canvas_length)  # a forward pass stores the text before every canvas
        assert row.num_forwards == len(canvases) + num_stored


def test_a_batch_and_shared_prefixes_change_nothing() -> None:
    model = refusion_lit.load(CHECKPOINT, dtype="float64").backbone
    decoder = UniformDiffusion(canvas_length=16, num_steps=6, entropy_bound=1.0)
    few_shot = (8, 4, 10, 6, 9, 13) * 14
    prompts = [Prompt(token_ids=(*few_shot, *rest), id=str(i)) for i, rest in enumerate([(3,), (3,), (4, 5), (7,) * 9])]
    prompts.append(Prompt(token_ids=(9, 10, 1, 14), id="short"))
    for temperature, seed in ((0.0, 0), (1.0, 5)):
        sampling = SamplingParams(max_new_tokens=37, temperature=temperature, seed=seed)
        alone = [decode(model, decoder, [prompt], sampling).rows[0] for prompt in prompts]
        output = decode(model, decoder, prompts, sampling, batch_size=3)
        assert output.num_shared > 0
        assert [row.token_ids for row in output.rows] == [row.token_ids for row in alone]
        assert [row.num_forwards for row in output.rows] == [row.num_forwards for row in alone]
        assert alone[0].token_ids != alone[1].token_ids, "draws depend on the prompt's id"


def test_temperature_multiplies_the_schedule() -> None:
    decoder = UniformDiffusion(num_steps=4, t_min=0.4, t_max=0.8)
    assert [decoder.step_temperature(step) for step in (4, 3, 2, 1)] == pytest.approx([0.8, 0.7, 0.6, 0.5])


# Training.


def test_training_computes_what_decoding_computes() -> None:
    """A training batch gives the hidden states of a cached prompt and a canvas after it.

    Texts are shorter and longer than the window. Self-conditioned canvases read the prediction at temperature 1.
    """
    model = refusion_lit.load(CHECKPOINT, dtype="float64").backbone
    text = torch.randint(0, 24, (4, 40), generator=torch.Generator().manual_seed(0))
    lengths = {"prompt_lengths": torch.tensor([3, 9, 17, 30]), "response_lengths": torch.tensor([37, 3, 20, 10])}
    batch = ResponseBatch(input_ids=text, sample_keys=torch.arange(4), **lengths)
    noise = KeyedNoise.for_samples(batch.sample_keys, seed=0, epoch=0)
    corrupted = UniformBlock(canvas_length=7).corrupt(batch, noise, model.special_tokens)
    assert corrupted.is_conditioned is not None
    assert corrupted.visible is not None
    corrupted.is_conditioned = torch.tensor([True, False, True, False])
    states = model(
        corrupted.input_ids, corrupted.position_ids, corrupted.visible,
        num_canvas=7, is_conditioned=corrupted.is_conditioned,
    )  # fmt: skip
    states.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    run, draw = model.canvas_runner(), Draw(sampling=SamplingParams())
    for row, is_conditioned in enumerate(corrupted.is_conditioned.tolist()):
        start = int(corrupted.position_ids[row, 40])
        ids, canvas = corrupted.input_ids[row, :start].tolist(), corrupted.input_ids[row, 40:].tolist()
        branches = [
            Branch(tokens=ids, positions=range(start)),
            Branch(
                tokens=canvas, positions=range(start, start + 7), order=[0] * 7, visible=((0, start),), write_at=start
            ),
        ]
        cache = model.make_cache(1)
        with torch.no_grad():
            for branch in branches:
                batch = Batch([Forward(phase="", branches=(branch,), draw=draw)], [0], model.device, cache)
                inputs = batch.ids, batch.positions, batch.visibility, cache
                if branch is branches[0]:
                    expected = model.hidden_states(*inputs)
                    torch.testing.assert_close(states[row, :start], expected[0], rtol=1e-5, atol=1e-6)
            expected = run(*inputs)
            if is_conditioned:
                signal = model.soft_embeddings(model.head(expected[0]).softmax(-1))
                assert signal is not None
                expected = run(*inputs, signal=signal[None])
            torch.testing.assert_close(states[row, 40:], expected[0], rtol=1e-5, atol=1e-6)


class GivenNoise(KeyedNoise):
    """Noise whose streams have given numbers."""

    def __init__(self, **streams: torch.Tensor) -> None:
        self._streams = streams

    def uniform(self, stream: str, size: int) -> torch.Tensor:
        return self._streams[stream][:, :size]

    bits = uniform


def test_the_loss_is_the_cross_entropy_of_transformers_logits() -> None:
    """Canvases and targets are written by hand; the last canvas is longer than its response."""
    theirs, ours = make_two_models(random_config(4, 5, ["sliding_attention", "full_attention"], 2))
    text = torch.randint(3, 37, (3, 24), generator=torch.Generator().manual_seed(2))
    prompts, responses, blocks = [3, 9, 11], [21, 8, 13], [3, 0, 2]
    is_conditioned = [True, False, True]
    t, uniform = torch.tensor([[0.2], [0.7], [0.5]]).double(), torch.rand(3, 5, generator=torch.Generator()).double()
    random = torch.tensor([[4, 5, 6, 7, 8], [9, 10, 11, 12, 13], [14, 15, 16, 17, 18]])
    noise = GivenNoise(
        block=torch.tensor(blocks)[:, None],
        mask_ratio=t,
        replaced=uniform,
        random_token=random,
        self_conditioning=torch.tensor([[0.1], [0.9], [0.1]]),
    )
    lengths = {"prompt_lengths": torch.tensor(prompts), "response_lengths": torch.tensor(responses)}
    batch = ResponseBatch(input_ids=text, sample_keys=torch.arange(3), **lengths)
    objective = UniformBlock(canvas_length=5, ar_weight=0.3)
    corrupted = objective.corrupt(batch, noise, ours.special_tokens)
    with torch.no_grad():
        hidden = ours(
            corrupted.input_ids, corrupted.position_ids, corrupted.visible,
            num_canvas=corrupted.num_canvas, is_conditioned=corrupted.is_conditioned,
        )  # fmt: skip
        output = objective.loss(hidden, ours.head, corrupted)

        diffusion, ar = [], []
        for row in range(3):
            end = prompts[row] + responses[row]
            start = prompts[row] + 5 * blocks[row]
            clean = [int(text[row, place]) if place < end else 0 for place in range(start, start + 5)]  # 0: padding
            ratio = (1 - 1e-4) * float(t[row]) + 1e-4  # the objective's smallest ratio is 1e-4
            canvas = [int(random[row, i]) if float(uniform[row, i]) < ratio else token for i, token in enumerate(clean)]
            inputs = {"input_ids": text[row : row + 1, :start], "decoder_input_ids": torch.tensor([canvas])}
            logits = theirs(**inputs).logits
            if is_conditioned[row]:
                logits = theirs(**inputs, self_conditioning_logits=logits).logits
            diffusion += torch.nn.functional.cross_entropy(logits[0], torch.tensor(clean), reduction="none").tolist()
            encoded = theirs.model.encoder(input_ids=text[row : row + 1, :end]).last_hidden_state
            logits = 5 * torch.tanh(theirs.lm_head(encoded)[0] / 5)  # final_logit_softcapping is 5
            targets = range(prompts[row], end)
            ar += [-float(logits[place - 1].log_softmax(-1)[text[row, place]]) for place in targets]
    expected = sum(diffusion) / len(diffusion), sum(ar) / len(ar)
    assert output.means.tolist() == pytest.approx(expected, rel=1e-5)
    assert float(output.total) == pytest.approx(expected[0] + 0.3 * expected[1], rel=1e-5)


@pytest.mark.parametrize("is_gemma", [True, False])
def test_the_checkpoint_of_a_fit_decodes(is_gemma: bool, tmp_path: Path) -> None:
    source = str(CHECKPOINT)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    backbone = {"source": source} if is_gemma else {"config": {"model_type": "llama", **sizes}}
    tokenizer = {"class_path": "PretrainedTokenizer", "init_args": {"source": source}}
    checkpoints = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"save_last": True, "every_n_train_steps": 4, "save_top_k": -1},
    }
    values = {
        "run_name": "canvas",
        "trainer": {"accelerator": "cpu", "max_steps": 8, "limit_val_batches": 1, "val_check_interval": 4,
                    "enable_progress_bar": False, "callbacks": [checkpoints]},
        "model": {
            "backbone": backbone,
            "objective": {"class_path": "UniformBlock", "init_args": {"canvas_length": 16}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.002}},
            "schedule": {"warmup_steps": 1},
        },
        "data": {
            "task": {"class_path": "Additions", "init_args": {"num_train": 64, "num_validation": 4, "num_test": 3}},
            "tokenizer": tokenizer if is_gemma else {"class_path": "CharacterTokenizer"},
            "batch_size": 8, "max_length": 128,
        },
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["fit", "--config", str(path), "--num_threads=1", f"--runs_dir={tmp_path}"]) in (None, 0)
    [last] = tmp_path.rglob("last.ckpt")
    model = refusion_lit.load(last)
    assert model.backbone.traits.predictions == ("visible", "next_token")
    decoder = model.default_decoder
    assert isinstance(decoder, UniformDiffusion)
    assert decoder.canvas_length == (16 if is_gemma else 32)
    [first] = model.generate(["12+34>"], max_new_tokens=20)
    save_model(model.backbone, model.tokenizer, tmp_path / "saved")
    [again] = refusion_lit.load(tmp_path / "saved").generate(["12+34>"], max_new_tokens=20)
    assert first.token_ids == again.token_ids


def test_adapters_of_shared_weights_are_refused() -> None:
    options = BackboneConfig(source=str(CHECKPOINT), lora=LoraOptions())
    with pytest.raises(ValueError, match=r"^backbone\.lora: .*share weights"):
        options.build(refusion_lit.load(CHECKPOINT).tokenizer)


def test_sharding_of_shared_weights_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(DiffusionGemmaForBlockDiffusion, "from_pretrained", read)
    options = BackboneConfig(source=str(CHECKPOINT))
    with pytest.raises(ValueError, match=r"^trainer\.strategy: .*share weights.*ddp"):
        options.build(PretrainedTokenizer(source=str(CHECKPOINT)).build(None), is_sharded=True)


# Checkpoints.


def variant(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of the golden checkpoint with another config."""
    shutil.copytree(CHECKPOINT, folder / "model")
    path = folder / "model" / "config.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    return folder / "model"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda config: config["text_config"].update(num_experts=6), r"6 experts.* got 8"),
        (lambda config: config["text_config"].update(top_k_experts=9), r"top_k_experts"),
        (
            lambda config: config["text_config"].update(layer_types=["sliding_attention", "new", "full_attention"]),
            "layer_types.*'new'",
        ),
        (lambda config: config["text_config"].update(global_head_dim=16), "shape"),
        (lambda config: config.pop("text_config"), "text_config"),
        (lambda config: config.update(canvas_length=0), "canvas_length"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(
    edit: Callable[[dict[str, Any]], object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        refusion_lit.load(variant(tmp_path, edit)).default_decoder  # noqa: B018
    assert "\n" not in str(caught.value)


def test_four_shards_load_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    folder = variant(tmp_path, lambda _: None)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 4}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in {*files.values()}:
        save_file({name: weights[name] for name in files if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    refusion_lit.load(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2\.safetensors"):
        refusion_lit.load(folder)


def test_settings_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    folder = variant(tmp_path, lambda _: None)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "t_min": "low"}))
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        refusion_lit.load(folder)


def test_images_are_not_read() -> None:
    with pytest.warns(UserWarning, match="vision tower") as notices:
        model = refusion_lit.load(CHECKPOINT)
    assert len(notices) == 1
    assert not any("vision" in name for name in model.backbone.state_dict())
    prompt = Prompt(token_ids=(18, 21, 3), id="p")
    with pytest.raises(ValueError, match=r"^prompt p: .*image"):
        decode(model.backbone, model.default_decoder, [prompt], SamplingParams(max_new_tokens=4))


def test_a_saved_model_decodes_as_before(tmp_path: Path) -> None:
    model = refusion_lit.load(CHECKPOINT)
    expected = model.generate(["12+34>"], max_new_tokens=20)[0].token_ids
    save_model(model.backbone, model.tokenizer, tmp_path / "saved")
    loaded = refusion_lit.load(tmp_path / "saved")
    assert loaded.default_decoder == model.default_decoder
    assert loaded.backbone.special_tokens == model.backbone.special_tokens
    assert loaded.generate(["12+34>"], max_new_tokens=20)[0].token_ids == expected
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == [
        "DiffusionGemmaForBlockDiffusion"
    ]
