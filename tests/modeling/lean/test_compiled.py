from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoTokenizer

from fakes import SPECIAL, VOCAB, tiny_backbone
from meeting_points import MeetingPoints
from refusion_lit.decoding import ReFusion, decode
from refusion_lit.modeling import kv_cache
from refusion_lit.modeling.backbone import Backbone
from refusion_lit.modeling.fused import compiled as compiled_module
from refusion_lit.modeling.fused.compiled import CompiledBody
from refusion_lit.modeling.loading import BackboneConfig
from refusion_lit.modeling.lora import LoraOptions
from refusion_lit.types import ModelTraits, Prompt, SamplingParams
from slow_decoding import cut

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
GOLDENS = Path(__file__).parents[2] / "goldens"
DECODER = ReFusion(slot_size=4, slot_threshold=0.2, token_threshold=0.2)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Let programs be traced but not compiled, and count them."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compiled_module, "_BACKEND", counter)
    yield counter
    torch._dynamo.reset()


def pair() -> tuple[Backbone, Backbone]:
    """Return a model run by the library's forward, and compiled."""
    model = tiny_backbone()
    given = (copy.deepcopy(model.model), model.traits, model.special_tokens)
    return Backbone(*given, lean=False), Backbone(*given, compile=True)


def texts(model: Backbone, prompts: list[Prompt], size: int, length: int = 24) -> list[list[int]]:
    sampling = SamplingParams(max_new_tokens=length)
    return [row.token_ids for row in decode(model, DECODER, prompts, sampling, batch_size=size).rows]


def prompts_of(*lengths: int) -> list[Prompt]:
    return [
        Prompt(token_ids=tuple(3 + (7 * i + j * j) % 9 for j in range(n)), id=str(i)) for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_library_s_forward_for_any_rows_and_lengths(
    seed: int, counter: CompileCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows left out, rows several times, padding, entries kept, storage that grows."""
    monkeypatch.setattr(kv_cache, "CHUNK", 8)
    chance = random.Random(seed)
    pairs = [(one, one.make_cache(3)) for one in pair()]
    compiled = pairs[1][1].body
    assert isinstance(compiled, CompiledBody)
    for step in range(8):
        rows = [[0, 1, 2], [2], [0, 2], [1, 0, 1, 1], [2, 1, 0], [1, 1]][chance.randrange(6) if step else 0]
        length, num_keys = chance.randint(1, 12), 12 + 3 * step
        fed = [chance.randint(1, length) if step else length for _ in rows]
        # Sequences of one row write to places of their own.
        writes = {row: iter(chance.sample(range(num_keys), num_keys)) for row in rows}
        rows = [row for row in rows if rows.count(row) * length <= num_keys]
        fed = fed[: len(rows)]
        if not rows:
            continue
        places = [(i * length + j, row, next(writes[row])) for i, row in enumerate(rows) for j in range(fed[i])]
        source, row_index, cache_index = (torch.tensor(values) for values in zip(*places, strict=True))
        ids = torch.tensor([[chance.randrange(VOCAB) for _ in range(length)] for _ in rows])
        positions = torch.tensor([[chance.randrange(60) for _ in range(length)] for _ in rows])
        mask = torch.rand(len(rows), length, num_keys, generator=torch.Generator().manual_seed(seed + step)) < 0.5
        mask[:, :, step] = True
        states = []
        for one, cache in pairs:
            cache.prepare(rows, num_keys, None if len(places) == ids.numel() else source, row_index, cache_index)
            with torch.no_grad():
                states.append(one.hidden_states(ids, positions, mask, cache).flatten(0, 1)[source])
            cache.compact(rows[0], [3, 1, 0, 2])
        torch.testing.assert_close(states[0], states[1], rtol=1e-6, atol=1e-6)
    assert pairs[1][1].capacity >= 32
    assert counter.frame_count == len(compiled.shapes) > 1


def test_a_long_decode_is_compiled_for_a_few_shapes(counter: CompileCounter) -> None:
    library, model = pair()
    prompts = prompts_of(3, 30, 9, 140, 5)
    for size in (1, 3):
        assert texts(model, prompts, size, 112) == texts(library, prompts, size, 112)
    compiled = model.make_cache(1).body
    assert isinstance(compiled, CompiledBody)
    keys, entries = ({shape[place] for shape in compiled.shapes} for place in (2, 5))
    assert keys == {128, 256}
    assert entries == {512}
    # Tokens a row, times rows (alone; of three: 1, 2, 3 and, for infills, 4), times the keys.
    bound, num_compiled = len(compiled_module._TOKENS) * 5 * 2, counter.frame_count
    assert num_compiled == len(compiled.shapes) <= bound
    texts(model, prompts, 3, 112)
    assert counter.frame_count == num_compiled
    texts(model, prompts_of(4, 28, 77), 3, 110)
    assert counter.frame_count == len(compiled.shapes) <= bound


def test_golden_texts_do_not_change(counter: CompileCounter) -> None:
    reference = json.loads((GOLDENS / "refusion_decode_clean.json").read_text())
    directory = str(GOLDENS / "models" / "additions-clean")
    model = BackboneConfig(source=directory, compile=True).build(AutoTokenizer.from_pretrained(directory)).eval()
    options, eos = reference["settings"][0], reference["eos_token_id"]
    runs = [run for run in reference["runs"] if run["setting"] == 0]
    decoder = ReFusion(
        slot_size=options["slot_size"], num_serial_blocks=options["serial_num_blocks"],
        slot_threshold=options["slot_threshold"], token_threshold=options["token_threshold"],
    )  # fmt: skip
    prompts = [Prompt(token_ids=tuple(run["prompt"]), id=str(i)) for i, run in enumerate(runs)]
    sampling = SamplingParams(max_new_tokens=options["gen_length"])
    for size in (1, 8):
        output = decode(model, decoder, prompts, sampling, batch_size=size)
        for run, row in zip(runs, output.rows, strict=True):
            assert row.token_ids == cut(run["output"], [eos])
    assert counter.frame_count > 0


def test_prompts_and_forwards_without_a_cache_are_not_compiled(counter: CompileCounter) -> None:
    library, model = pair()
    ids = torch.randint(0, VOCAB, (1, 130), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(130)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model.hidden_states(ids, positions, None), library.hidden_states(ids, positions, None)
        )
    assert texts(model, [Prompt(token_ids=tuple(ids[0].clamp(min=3).tolist()), id="0")], 1, 8)
    shapes = model.make_cache(1).body.shapes  # pyright: ignore[reportFunctionMemberAccess, reportOptionalMemberAccess]
    assert {shape[1] for shape in shapes} <= {8, 16}
    assert counter.frame_count == len(shapes)


def test_weights_may_change_between_two_generations(counter: CompileCounter) -> None:
    library, model = pair()
    prompts = prompts_of(4, 9)
    first, found = texts(model, prompts, 2), counter.frame_count
    with torch.no_grad():
        for weight in model.model.parameters():  # norms are copied when a body is made
            weight.add_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype))
    second = texts(model, prompts, 2)
    assert first != second == texts(library, prompts, 2)
    assert model.make_cache(1).body is model.make_cache(2).body
    known = model.make_cache(1).body
    model.body.layers[0].mlp.up_proj.weight = nn.Parameter(model.body.layers[0].mlp.up_proj.weight.detach() * 2)
    assert texts(model, prompts, 2) == texts(library, prompts, 2)
    assert model.make_cache(1).body is not known
    assert found > 0
    assert copy.deepcopy(model).compile_steps


def test_it_serves_in_inference_mode_and_out_of_it(counter: CompileCounter) -> None:
    library, model = pair()
    prompts = prompts_of(4, 9)
    expected = texts(library, prompts, 2)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert texts(model, prompts, 2) == expected
    assert counter.frame_count == len(compiled_module.compiled_body(model.body).shapes)


def test_what_graphs_record_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and storage are marked as such, and storage outlives its cache."""
    torch._dynamo.reset()
    unmarked: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        inputs = [node.meta.get("tensor_dict", {}) for node in graph.graph.nodes if node.op == "placeholder"]
        unmarked.append(sum("_dynamo_static_input_type" not in one for one in inputs))
        return graph

    monkeypatch.setattr(compiled_module, "_BACKEND", backend)
    library, model = pair()
    prompts = prompts_of(4, 9)
    expected = texts(library, prompts, 2)
    assert texts(model, prompts, 2) == expected
    compiled = model.make_cache(2).body
    assert isinstance(compiled, CompiledBody)
    storage = compiled._stored[0] + compiled._stored[1]
    assert set(unmarked) == {4, 5}  # ids, positions, mask, where to write and perhaps which rows to read
    before = [states.data_ptr() for states in storage]
    for _ in range(2):
        assert texts(model, prompts, 2) == expected
        assert [states.data_ptr() for states in compiled._stored[0] + compiled._stored[1]] == before
    first, second = model.make_cache(2), model.make_cache(2)
    ids = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        for cache in (first, second):  # one that is in use keeps its own
            cache.prepare([0, 1], 1, None, torch.tensor([0, 1]), torch.tensor([0, 0]))
            model.hidden_states(ids, ids, torch.ones(2, 1, 1, dtype=torch.bool), cache)
    nothing = storage[0][0, :0]
    used = [cache.storage(0, nothing, nothing)[0].data_ptr() for cache in (first, second)]
    assert used[0] == before[0] != used[1]
    torch._dynamo.reset()


def test_the_host_waits_for_nothing() -> None:
    model = pair()[1]
    cache = model.make_cache(3)
    ids, positions = torch.randint(0, VOCAB, (2, 5)), torch.arange(5).expand(2, 5)
    source, mask = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9]), torch.ones(2, 5, 5, dtype=torch.bool)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for rows in ([2, 0], [1, 1]):
            cache.prepare(rows, 5, source, torch.tensor(rows)[source // 5], source % 5)
            with MeetingPoints() as points:
                model.hidden_states(ids, positions, mask, cache)
            assert points.found == []


@pytest.mark.parametrize("options", [{"lean": False}, {"attn_implementation": "eager"}])
def test_what_cannot_be_compiled_is_refused_early(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"backbone.compile: expected .*, got .*; set .*, or compile: false"):
        BackboneConfig(source="somewhere", compile=True, **options)
    model = copy.deepcopy(tiny_backbone().model)
    if "attn_implementation" in options:
        model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"backbone.compile: expected"):
        Backbone(model, ModelTraits(), SPECIAL, lean=options.get("lean", True), compile=True)


def test_adapters_are_refused_early() -> None:
    with pytest.raises(ValueError, match=r"backbone.compile: expected a model without adapters, got lora; set compile"):
        BackboneConfig(source="somewhere", compile=True, lora=LoraOptions())


def test_a_body_that_is_not_known_is_refused_when_it_decodes() -> None:
    model = pair()[1]
    model.body.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"backbone.compile: expected a model .* got Qwen3Model .*compile: false"):
        model.make_cache(1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU takes a C++ compiler")
def test_compiled_code_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_module, "_TOKENS", (16,))
    library, model = pair()
    prompts = prompts_of(4, 9, 6)
    assert texts(model, prompts, 3) == texts(library, prompts, 3)
    shapes = model.make_cache(3).body.shapes  # pyright: ignore[reportFunctionMemberAccess, reportOptionalMemberAccess]
    assert shapes
    torch._dynamo.reset()
