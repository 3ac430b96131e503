"""Arbitrary config files are read or refused with a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.conftest import REPOSITORY
from hardness.malformed import NUM_EXAMPLES, PHASES, damaged_files, outcome
from refusion_lit.cli.lightning import RefusionCLI, parse_only
from refusion_lit.cli.sweep import read_sweep
from refusion_lit.utils.files import read_yaml

FUZZ = settings(max_examples=NUM_EXAMPLES, phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))
CONFIGS = REPOSITORY / "configs"
SWEEP = b"""base: [x.yaml]
subcommands: [fit, test]
options: {trainer.max_steps: 3}
grid: {model.decoders.refusion.slot_size: [2, 4]}
entries: [{model.lr: 1.0e-4}, {model.lr: 1.0e-2}]
launcher: {class_path: Local, init_args: {num_workers: 1}}
"""
TOKENS = [
    "!!timestamp x", "!!int a", "!!float b", "!!bool c", "!!binary '*'", "!!set {a}", "!!omap [a: 1]", "!unknown x",
    "!!python/name:os.system", "!!python/object/apply:os.getcwd []", "&a [*a]", "&b {c: *b}", "*none", "2001-99-99",
    "2001-01-01", "0b", "0x_", "0o9", "1_", ".inf", ".nan", "1e999", "9" * 400, "7" * 5000, "<<: 3", "<<: [1]",
    "? [a]\n: 1", "? {}", "=", "~", "- - -", "\t", "%YAML 9.9\n---\n", "---\n", "...\n", '"\\ud800"', '"\\x00"',
    "[\n" * 300, "{a: " * 300, "[\n" * 5000, "\ufeff", "@", "`", "|\n x", "null:", ": x", "class_path: x",
    "class_path: []", "class_path: ReFusion", "init_args: 3", "init_args: {1: 2}", "init_args: {a: 2001-01-01}",
]  # fmt: skip
TOKEN_BYTES = [token.encode("utf-8", "surrogatepass") for token in TOKENS]


def yamls(valid: bytes) -> st.SearchStrategy[bytes]:
    """Draw a damaged config, a config of unusual parts, or bytes that are not YAML."""
    part = st.one_of(st.sampled_from(TOKENS), st.text(max_size=5))
    key = st.sampled_from(
        ["data", "model", "trainer", "seed_everything", "grid", "base", "class_path", "init_args", "ckpt_path"]
    )
    lines = st.lists(st.one_of(part, st.builds("{}: {}".format, key, part)), max_size=3).map("\n".join)
    return st.one_of(
        damaged_files(valid, TOKEN_BYTES),
        lines.map(lambda text: text.encode("utf-8", "replace")),
        st.binary(max_size=30),
    )


@pytest.fixture(scope="module")
def cli() -> RefusionCLI:
    return parse_only()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs") / "config.yaml"


@settings(FUZZ, max_examples=max(NUM_EXAMPLES // 5, 3))  # a parse takes almost a second
@given(content=yamls((CONFIGS / "quickstart.yaml").read_bytes()), command=st.sampled_from(["fit", "test"]))
def test_a_config_of_a_run(cli: RefusionCLI, path: Path, content: bytes, command: str) -> None:
    path.write_bytes(content)
    outcome(lambda: cli.parse([command, f"--config={path}"]))


@settings(FUZZ, max_examples=max(NUM_EXAMPLES // 5, 3))
@given(content=yamls((CONFIGS / "decoder" / "refusion.yaml").read_bytes()))
def test_a_component(cli: RefusionCLI, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    config = f"--config={CONFIGS / 'quickstart.yaml'}"
    outcome(lambda: cli.parse(["fit", config, f"--model.decoders.x={path}"]))


@FUZZ
@given(content=yamls(SWEEP))
def test_a_sweep(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    outcome(lambda: read_sweep(path))
    outcome(lambda: read_yaml(path, "base"))
