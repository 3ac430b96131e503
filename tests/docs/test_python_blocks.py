"""The Python blocks of pages that load the directory ``exported`` run, in order and as they stand."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "goldens" / "models" / "additions-clean"
PYTHON = ROOT / "docs" / "python.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if 'load("exported"' in page.read_text(encoding="utf-8")
]


def run(page: Path) -> dict[str, Any]:
    """Run a page's blocks in one scope, as a reader does who copies them one after the other."""
    scope: dict[str, Any] = {"__name__": "page"}
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec", dont_inherit=True), scope)
    return scope


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory that holds the model."""
    shutil.copytree(MODEL, tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "exported"


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in (PYTHON, BENCHMARKS)], ids=lambda page: page.name
)
def test_the_blocks_run(page: Path) -> None:
    scope = run(page)
    assert scope["model"].backbone is not None
    if page.name == "infilling.md":
        assert [row.text for row in scope["rows"]] == ["12+34=46;56+78=134;", "11+22=33;33+44=77;"]


def test_prompts_are_of_the_kind_that_the_quickstart_trains_on() -> None:
    """Two sums or more: on a single one the model writes nonsense."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "examples").glob("*.py")]
    actual = {page.name: re.findall(r'"\d+\+\d+[>=]"', page.read_text(encoding="utf-8")) for page in pages}
    assert len(actual) > 30
    assert {name: prompts for name, prompts in actual.items() if prompts} == {}


@pytest.mark.usefixtures("exported")
def test_the_harness_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's task is on the hub: its call is checked, and tests of the adapter run tasks that are not."""
    pytest.importorskip("lm_eval")
    from refusion_lit.evaluation import lm_eval

    signature = inspect.signature(lm_eval.evaluate)
    calls: list[inspect.BoundArguments] = []
    monkeypatch.setattr(lm_eval, "evaluate", lambda *args, **options: calls.append(signature.bind(*args, **options)))
    scope = run(BENCHMARKS)
    [call] = calls
    adapter, tasks = call.args[:2]
    assert isinstance(adapter, lm_eval.RefusionLitModel)
    assert tasks == ["gsm8k_cot"]
    assert scope["model"].backbone is not None


@pytest.mark.usefixtures("exported")
def test_generating_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    scope = run(PYTHON)
    assert scope["trainer"].global_step == 5
    assert [row.text for row in scope["rows"]] == ["12+34=46;56+78=134;", "11+22=33;33+44=77;"]
    assert scope["first"].text == "12+34=46"
    assert scope["first"].finish_reason == "stop"
    printed = capsys.readouterr().out.splitlines()
    streamed = [line.removeprefix("0 ") for line in printed if line.startswith("0 ")]
    assert len(streamed) > 1
    assert streamed[-1] == "12+34=46;56+78=134; eos"
    assert all(streamed[-1].startswith(text) for text in streamed)


@pytest.mark.usefixtures("exported")
def test_what_the_page_says_about_options(capsys: pytest.CaptureFixture[str]) -> None:
    from refusion_lit.decoding import SelfSpeculative
    from refusion_lit.types import DecodingOptions, SamplingParams

    model = run(PYTHON)["model"]
    sampling = {seed: SamplingParams(max_new_tokens=24, temperature=3.0, seed=seed) for seed in (0, 1)}

    def texts(seed: int, **options: Any) -> list[str]:
        rows = model.generate(
            ["12+34,56+78>"] * 3, decoder=SelfSpeculative(slot_size=8), sampling=sampling[seed], **options
        )
        return [row.text for row in rows]

    assert len(set(texts(0))) == 3
    assert texts(0) == texts(0, batch_size=3)
    assert texts(0) != texts(1)
    assert len(set(texts(0, ids=["a", "a", "a"]))) == 1
    page = PYTHON.read_text(encoding="utf-8")
    methods = (type(model).generate, type(model).generate_ids, type(model).decode)
    taken = [p for method in methods for p in inspect.signature(method).parameters.values()]
    options = {p.name for p in taken if p.kind is p.KEYWORD_ONLY} | {*DecodingOptions.__dataclass_fields__}
    rows = page.partition("| `generate` |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == options
    rows = page.partition("| `SamplingParams` |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(SamplingParams.__dataclass_fields__)
