"""The sandbox against code that escapes, outlives its run, or passes without being correct."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from refusion_lit.sandbox import Limits, Outcome, Sandbox
from refusion_lit.sandbox.folder import delete_tree
from refusion_lit.sandbox.isolation import Isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

QUICK = Limits(
    seconds=1.0, cpu_seconds=1, memory_mb=128, file_mb=1, disk_mb=4, num_files=50, num_open_files=32, num_processes=16
)
LAYERS = (
    ("bubblewrap", "tmpfs", "landlock", "seccomp"),
    ("namespaces", "tmpfs", "landlock", "seccomp"),
    ("landlock", "seccomp"),
)


@pytest.fixture(scope="module", params=LAYERS, ids="-".join)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    box = Sandbox(limits=QUICK, layers=request.param, minimum="limits")
    if box.isolation.level != "full" or len(box.isolation.layers) < len(request.param):
        pytest.skip(f"this machine offers only {box.isolation.describe()}")
    return box


def test_correct_code_passes_and_wrong_code_fails(sandbox: Sandbox) -> None:
    assert sandbox.run("def f(x): return x + 1", "assert f(1) == 2") == Outcome(status="passed")
    wrong = sandbox.run("def f(x): return x", "assert f(1) == 2, 'one more'")
    assert (wrong.passed, wrong.status, wrong.message) == (False, "failed", "tests: AssertionError: one more")
    assert sandbox.run("def f(x) return x", "").message.startswith("program: SyntaxError")


def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    program = """
import asyncio, collections, dataclasses, hashlib, heapq, itertools, math, random, re, tempfile, threading, decimal
@dataclasses.dataclass
class Point:
    x: int
async def two():
    return 2
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("a")
seen = []
thread = threading.Thread(target=seen.append, args=(1,))
thread.start()
thread.join()
"""
    assert sandbox.run(program, "assert seen == [1] and asyncio.run(two()) == 2 and Point(1).x == 1").passed


@pytest.mark.parametrize(
    "early",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        (
            'import os\nfor i in range(3, 32):\n    try: os.write(i, b\'{"tests": "done"}\\n{"nonce": ""}\\n\')\n'
            "    except OSError: pass\nos._exit(0)"
        ),
        "print('passed')\nimport ctypes; ctypes.string_at(0)",
    ],
)
def test_an_early_exit_never_passes(sandbox: Sandbox, early: str) -> None:
    for program, tests in ((early, ""), (f"def f():\n    exec({early!r})", "f()\nassert False")):
        assert not sandbox.run(program, tests).passed


def test_infinite_loops_are_stopped(sandbox: Sandbox) -> None:
    started = time.monotonic()
    assert sandbox.run("while True: pass", "").status in ("timeout", "exited")
    assert sandbox.run("import time\ntime.sleep(60)", "").status == "timeout"
    assert time.monotonic() - started < 30


def test_memory_is_limited(sandbox: Sandbox) -> None:
    assert "MemoryError" in sandbox.run("x = bytearray(256 << 20)", "").message
    assert not sandbox.run("x = []\nwhile True: x.append(bytearray(1 << 20))", "").passed


def test_no_process_can_be_started(sandbox: Sandbox) -> None:
    for start in ("os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "os.system('true') and 1/0",
                  "os.execv('/bin/true', ['true'])", "ctypes.CDLL(None).syscall(57) < 0 and 1/0"):  # fmt: skip
        assert sandbox.run(f"import os, ctypes\n{start}", "").status == "failed", start
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert not sandbox.run(bomb, "").passed


def test_files_and_their_number_are_limited(sandbox: Sandbox) -> None:
    assert "OSError" in sandbox.run("open('big', 'wb').write(bytes(2 << 20))", "").message
    assert "OSError" in sandbox.run("files = [open(str(i), 'w') for i in range(64)]", "").message


def test_the_files_of_a_run_are_limited_as_a_whole(sandbox: Sandbox) -> None:
    few = "for i in range(3): open(str(i), 'wb').write(bytes(1 << 20))"
    assert sandbox.run(few, "import os\nos.makedirs('/'.join('abcdefgh'))").passed
    large = "for i in range(5): open(str(i), 'wb').write(bytes(1 << 20))"
    many = "for i in range(60): open(str(i), 'w').close()"
    nested = "for i in range(60): os.mkdir('a'); os.chdir('a')"
    for attempt in (large, many, nested):
        outcome = sandbox.run(f"import os\n{attempt}", "")
        assert not outcome.passed, attempt
        assert "No space left" in outcome.message or outcome.message == "more than 4 MiB or 50 files"


def test_a_program_that_outgrows_its_limits_is_stopped_while_it_runs() -> None:
    box = Sandbox(limits=replace(QUICK, seconds=60), layers=(), minimum="limits")
    grow = "import time\nfor i in range(60): open(str(i), 'w').close()\ntime.sleep(600)"
    assert box.run(grow, "") == Outcome(status="exited", message="more than 4 MiB or 50 files")


def test_deeply_nested_directories_end_nothing_and_are_deleted(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    roomy = replace(sandbox, limits=replace(QUICK, num_files=5000))
    for name, depth in (("a", 1500), ("a" * 200, 1500)):
        program = f"import os\nfor i in range({depth}): os.mkdir('{name}'); os.chdir('{name}')"
        assert roomy.run(program, "open('file', 'w').close()").status in ("passed", "exited")
        assert list(tmp_path.iterdir()) == []


def test_trees_of_any_shape_are_deleted(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    top.mkdir()
    (top / "link").symlink_to(outside)
    (top / "closed" / "inner").mkdir(parents=True)
    (top / "closed" / "inner" / "file").write_text("a")
    (top / "closed" / "link").symlink_to(outside)
    (top / "closed").chmod(0)
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(5000):  # far longer than a path may be
        os.mkdir("nested", dir_fd=descriptor)
        below = os.open("nested", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    delete_tree(str(top))
    assert list(tmp_path.iterdir()) == [outside]
    assert (outside / "kept").read_text() == "kept"


def test_a_directory_that_cannot_be_deleted_is_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: str) -> None:
        os.rmdir(directory)
        raise OSError("busy")

    monkeypatch.setattr("refusion_lit.sandbox.folder.delete_tree", fail)
    with pytest.warns(UserWarning, match=r"the files of a program are left in .* \(busy\)"):
        assert Sandbox(limits=QUICK, layers=(), minimum="limits").run("", "").passed


@pytest.mark.parametrize(
    "message",
    ['{"error": ' + "[" * 900 + "]" * 900 + "}", '{"error": ' + "9" * 4000 + "}", '{"error": "\\ud800"}', "[" * 2000],
)
def test_messages_that_a_program_forges_end_nothing(sandbox: Sandbox, message: str) -> None:
    forge = f"for i in range(3, 32):\n    try: os.write(i, {message!r}.encode() + b'\\n')\n    except OSError: pass"
    outcome = sandbox.run(f"import os\n{forge}", "")
    assert outcome.status in ("failed", "exited")
    outcome.message.encode()


def test_messages_hold_no_lone_surrogates(sandbox: Sandbox) -> None:
    outcome = sandbox.run("raise ValueError('\\ud800')", "")
    assert outcome.message == "program: ValueError: \\ud800"


def test_files_outside_cannot_be_read_changed_or_deleted(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("planted")
    before = secret.stat()
    for attempt in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"open({str(secret)!r}, 'a')",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.remove({str(secret)!r})",
        f"os.rename({str(secret)!r}, 'mine')",
        f"os.link({str(secret)!r}, 'mine')",
        f"os.chmod({str(secret)!r}, 0o777)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.mkdir({str(tmp_path / 'folder')!r})",
        f"os.listdir({str(tmp_path)!r})",
        f"os.symlink({str(secret)!r}, 'link'); open('link').read()",
        f"os.setxattr({str(secret)!r}, 'user.a', b'b')",
        f"open('/proc/{os.getpid()}/environ').read()",
        "open('/etc/passwd').read()",
        "open('/etc/passwd', 'a')",
    ):
        assert sandbox.run(f"import os\n{attempt}", "").status == "failed", attempt
    after = secret.stat()
    assert (secret.read_text(), list(tmp_path.iterdir())) == ("planted", [secret])
    assert (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns)


def test_the_environment_is_hidden(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "secret")
    program = (
        "import os, sys\nassert 'secret' not in repr(dict(os.environ)) + repr(sys.argv)\nassert os.listdir() == []"
    )
    assert sandbox.run(program, "").passed


def test_there_is_no_network(sandbox: Sandbox) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        port = server.getsockname()[1]
        for attempt in (
            f"socket.create_connection(('127.0.0.1', {port}), 1)",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            "socket.socket(socket.AF_UNIX)",
        ):
            assert sandbox.run(f"import socket\n{attempt}", "").status == "failed", attempt
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_processes_cannot_be_killed_or_slowed_down(sandbox: Sandbox) -> None:
    for attempt in (f"os.kill({os.getpid()}, 0)", "os.kill(os.getppid(), 9)", "os.killpg(0, 9)",
                    f"resource.prlimit({os.getpid()}, resource.RLIMIT_CPU)", f"os.setpriority(0, {os.getpid()}, 19)",
                    f"os.sched_setaffinity({os.getpid()}, [0])"):  # fmt: skip
        assert sandbox.run(f"import os, resource\n{attempt}", "").status == "failed", attempt
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    for name in ("AS", "CPU", "FSIZE", "NOFILE"):
        raised = f"resource.setrlimit(resource.RLIMIT_{name}, (resource.RLIM_INFINITY,) * 2)"
        assert sandbox.run(f"import resource\n{raised}", "").status == "failed", name


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Sandbox(limits=QUICK, minimum="limits").run("open('a', 'w').write('b')", "").passed
    assert list(tmp_path.iterdir()) == []


def test_child_processes_are_killed_with_their_group(tmp_path: Path) -> None:
    file = tmp_path / "child"
    program = (
        f"import os, time\nif not (child := os.fork()):\n    time.sleep(60)\nopen({str(file)!r}, 'w').write(str(child))"
    )
    limits = replace(QUICK, num_processes=4096)  # without a user namespace, all processes of the user count
    assert Sandbox(limits=limits, layers=(), minimum="limits").run(program, "").passed
    status = Path("/proc") / file.read_text() / "stat"
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child outlived its program"
        time.sleep(0.01)


def test_too_weak_isolation_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="minimum_isolation: expected at least 'full', got limits"):
        Sandbox(limits=QUICK, layers=()).run("", "")
    assert Sandbox(limits=QUICK, layers=(), minimum="limits").run("", "").passed
    with pytest.raises(ValueError, match="minimum_isolation: expected one of limits, files, full, got 'most'"):
        Sandbox(minimum="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"limits\.memory_mb: expected an integer of at least 64"):
        Limits(memory_mb=1)


@pytest.mark.parametrize(
    ("layers", "level"),
    [((), "limits"), (("seccomp",), "limits"), (("namespaces",), "limits"), (("landlock",), "files"),
     (("landlock", "seccomp"), "full"), (("bubblewrap", "seccomp"), "full"),
     (("tmpfs", "seccomp"), "limits")],
)  # fmt: skip
def test_levels(layers: tuple[str, ...], level: str) -> None:
    assert Isolation(wrapper=(), layers=layers).level == level


def test_nothing_runs_if_the_isolation_is_not_applied() -> None:
    box = Sandbox(limits=QUICK, minimum="limits")
    box.__dict__["isolation"] = Isolation(wrapper=(), layers=("landlock", "moat"))
    with pytest.raises(ValueError, match="nothing was run"):
        box.run("", "")
