"""The sandbox against code that escapes, outlives its run, or passes without being correct."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from refusion_lit.sandbox.runner import LAYERS, Outcome, ResourceLimits, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

QUICK = ResourceLimits(seconds=1.0, cpu_seconds=1, memory_mb=128, file_mb=1)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    box = Sandbox(limits=QUICK, minimum="limits")
    if box.applied != LAYERS:
        pytest.skip(f"this machine offers only {box.describe()}")
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
            'import os\nfor i in range(3, 4096):\n    try: os.write(i, b\'{"tests": "done"}\\n{"nonce": ""}\\n\')\n'
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


def test_trees_of_any_shape_end_nothing_and_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(QUICK, seconds=60.0, cpu_seconds=60)  # thousands of folders on a busy machine
    sandbox = Sandbox(limits=limits, minimum="limits")
    outside = tmp_path / "outside"
    files = tmp_path / "files"
    for folder in (outside, files):
        folder.mkdir()
    (outside / "kept").write_text("kept")
    (outside / "kept").chmod(0o400)
    monkeypatch.setattr("tempfile.tempdir", str(files))
    links = f"os.symlink({str(outside)!r}, 'link'); os.makedirs('inner/most')"
    for shape in (
        links,
        *(f"for i in range(1500): os.mkdir({name!r}); os.chdir({name!r})" for name in ("a", "a" * 200)),
    ):
        assert sandbox.run(f"import os\n{shape}", "open('file', 'w').close()").status in ("passed", "exited")
        assert list(files.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"
    assert (outside / "kept").stat().st_mode & 0o777 == 0o400


def test_directories_without_permissions_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    close = "import os\nos.makedirs('closed/inner')\nopen('closed/inner/file', 'w').close()\nos.chmod('closed', 0)"
    assert Sandbox(limits=QUICK, layers=(), minimum="limits").run(close, "").passed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "message",
    ['{"error": ' + "[" * 900 + "]" * 900 + "}", '{"error": ' + "9" * 4000 + "}", '{"error": "\\ud800"}', "[" * 2000],
)
def test_messages_that_a_program_forges_end_nothing(sandbox: Sandbox, message: str) -> None:
    forge = f"for i in range(3, 4096):\n    try: os.write(i, {message!r}.encode() + b'\\n')\n    except OSError: pass"
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


@pytest.mark.parametrize("call", ["inotify_init", "inotify_init1", "fanotify_init"])
def test_names_in_closed_directories_stay_unknown(sandbox: Sandbox, call: str) -> None:
    outcome = sandbox.run(
        f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
descriptor = libc.{call}(0, 0)
watches = [libc.inotify_add_watch(d, b"/tmp", 0xFFF) for d in range(-1, 10)]
""",
        "assert descriptor == -1 and set(watches) == {-1}, (descriptor, watches)",
    )
    assert outcome.passed, outcome.message


def test_a_program_that_replaces_the_compiler_does_not_replace_its_tests(sandbox: Sandbox) -> None:
    program = """
import builtins
compile_, exec_ = builtins.compile, builtins.exec
builtins.compile = lambda source, *args, **options: compile_("pass", *args, **options)
builtins.exec = lambda code, *args: None
"""
    assert not sandbox.run(program, "assert False").passed


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


def test_datagrams_reach_no_socket_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "log"))
        send = f"a.sendto(b'out', {str(tmp_path / 'log')!r})"
        program = f"import socket\na, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n{send}"
        assert "Operation not permitted" in sandbox.run(program, "").message
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(8)


def test_files_send_no_signals(sandbox: Sandbox) -> None:
    start = "import fcntl, socket, struct\na, b = socket.socketpair()\n"
    for call in ("fcntl.F_SETOWN, 1", "10, 9", "15, struct.pack('ii', 1, 1)"):
        assert "Operation not permitted" in sandbox.run(f"{start}fcntl.fcntl(a, {call})", "").message
    for request in (0x8901, 0x8902):
        message = sandbox.run(f"{start}fcntl.ioctl(a, {request}, struct.pack('i', 1))", "").message
        assert "Operation not permitted" in message
    assert sandbox.run(f"{start}fcntl.fcntl(a, fcntl.F_GETFL)", "").passed


def test_annotations_are_evaluated(sandbox: Sandbox) -> None:
    assert "name 'List' is not defined" in sandbox.run("def f(x: List[int]): return x", "assert f(1)").message


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
    assert Sandbox(limits=QUICK, layers=(), minimum="limits").run(program, "").passed
    status = Path("/proc") / file.read_text() / "stat"
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child outlived its program"
        time.sleep(0.01)


def test_too_weak_isolation_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="minimum_isolation: expected at least 'full', got 'limits"):
        Sandbox(limits=QUICK, layers=()).run("", "")
    assert Sandbox(limits=QUICK, layers=(), minimum="limits").run("", "").passed
    with pytest.raises(ValueError, match="minimum_isolation: expected one of limits, full, got 'most'"):
        Sandbox(minimum="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"limits\.memory_mb: expected an integer of at least 64"):
        ResourceLimits(memory_mb=1)


def test_each_layer_alone_is_less_than_full() -> None:
    for layers in ((), ("landlock",), ("seccomp",)):
        box = Sandbox(limits=QUICK, layers=layers, minimum="limits")
        assert set(box.applied) <= set(layers)
        assert box.describe().startswith("limits (")


def test_nothing_runs_if_the_isolation_is_not_applied() -> None:
    box = Sandbox(limits=QUICK, minimum="limits")
    box.__dict__["applied"] = ("landlock", "moat")
    with pytest.raises(ValueError, match="nothing was run"):
        box.run("", "")
