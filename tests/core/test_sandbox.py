"""Programs that mean harm: each is stopped in time, and what is around it is as it was."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainwright.core.errors import ConfigError
from trainwright.core.sandbox import Limits, Program, Sandbox, SandboxError, _landlock, _seccomp

pytestmark = pytest.mark.skipif(not _seccomp.supported(), reason="needs seccomp")
LIMITS = Limits(wall_seconds=20, cpu_seconds=1, memory_bytes=256 << 20, output_bytes=100_000, disk_bytes=4 << 20)
SHORT = Limits(wall_seconds=0.7, cpu_seconds=60, memory_bytes=256 << 20)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=LIMITS) as box:
        yield box


def run(sandbox, code, **options):
    return sandbox.run(Program(code, **options))


def well(sandbox):
    """The worker still does what it should."""
    return sandbox.run("def f(x): return x + 1", calls=["f(1)"]).values == ("2",)


def test_values_tests_output_and_input(sandbox):
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndef f(x): return [x, input()]"
    result = run(sandbox, code, calls=("f(1)", "'a' + 'b'"), tests=("assert True", "assert 1 == 2"), stdin="line\n")
    assert result.status == "ok" and result.values == ("[1, 'line']", "'ab'")
    assert result.tests == (None, "AssertionError: ") and not result.passed
    assert result.stdout == "out\n" and result.stderr == "err\n"
    assert run(sandbox, "x = 1", tests=("assert x == 1",)).passed
    assert not run(sandbox, "x = 1").passed, "no test is no pass"


def test_programs_do_not_see_each_other(sandbox):
    assert run(sandbox, "import builtins; builtins.left = 1; open('left', 'w').write('x')").ok
    result = run(sandbox, "import builtins, os", calls=("hasattr(builtins, 'left')", "os.listdir('.')"))
    assert result.values == ("False", "[]")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import numpy", "ModuleNotFoundError"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_errors_are_told(sandbox, code, kind):
    result = run(sandbox, code)
    assert (result.status, result.error_type) == ("error", kind)


def test_endless_loop_meets_the_cpu_limit(sandbox):
    started = time.monotonic()
    result = run(sandbox, "while True: pass")
    # On a busy machine the wall clock may come first.
    assert result.timed_out and time.monotonic() - started < 40
    assert result.status == "cpu" or result.cpu_seconds < 1
    assert well(sandbox)


@pytest.mark.parametrize(
    "code",
    [
        "import time\nwhile True: time.sleep(1)",
        # a program that ignores every signal it can, and one that catches every exception
        "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, "
        "ValueError): pass\nwhile True: time.sleep(1)",
        "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass",
        # one that shuts its pipes, stops itself, or leaves threads behind
        "import os, time\nfor i in range(10):\n    try: os.close(i)\n    except OSError: pass\n"
        "while True: time.sleep(1)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import threading, time\n[threading.Thread(target=time.sleep, args=(99,)).start() for _ in range(5)]\n"
        "time.sleep(99)",
    ],
)
def test_waiting_meets_the_wall_clock(sandbox, code):
    started = time.monotonic()
    assert run(sandbox, code, limits=SHORT).status == "timeout"
    assert time.monotonic() - started < 30 and well(sandbox)


def test_threads_work_and_end_with_the_program(sandbox):
    code = (
        "import threading, time\nout = []\nt = threading.Thread(target=out.append, args=(7,))\nt.start()\nt.join()\n"
        "threading.Thread(target=time.sleep, args=(99,)).start()"
    )
    started = time.monotonic()
    assert run(sandbox, code, calls=("out",)).values == ("[7]",)
    assert time.monotonic() - started < 60, "it did not wait for the thread"


@pytest.mark.parametrize(
    "attempt",
    [
        "os.fork()", "os.forkpty()", "os.posix_spawn('/bin/true', ['true'], {})", "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])", "multiprocessing.Process(target=print).start()",
        "(lambda r: 1 / 0 if r >= 0 else None)(ctypes.CDLL(None).fork())",
        # clone() by itself, without CLONE_THREAD; 56 and 220 are its numbers
        "(lambda r: 1 / 0 if r >= 0 else None)(ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0))",
    ],
)  # fmt: skip
def test_no_process_is_started(sandbox, attempt):
    """A fork bomb is refused at its first fork. The attempt says so by raising, or ends with a negative number."""
    code = (
        f"import os, subprocess, multiprocessing, ctypes\nstarted = None\npid = os.getpid()\ntry:\n    {attempt}\n"
        "except ZeroDivisionError: started = True\nexcept OSError as error: started = False\n"
        "if os.getpid() != pid: os._exit(0)"
    )
    result = run(sandbox, code, calls=("started",))
    assert result.status == "ok" and result.values[0] != "True"
    if "CDLL" not in attempt:
        assert result.values == ("False",)


def test_memory_hog(sandbox):
    assert run(sandbox, "x = [0] * 10**9").status == "memory"
    assert run(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))").status == "memory"
    # one that catches the error keeps its limit
    code = "import mmap\nn = 0\ntry:\n    m = mmap.mmap(-1, 1 << 30)\n    n = 1\nexcept (OSError, MemoryError): pass"
    assert run(sandbox, code, calls=("n",)).values == ("0",)
    code = "import resource\ntry: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nexcept (OSError, ValueError): n = 0"
    assert run(sandbox, code, calls=("n",)).values == ("0",)
    assert well(sandbox)


@pytest.mark.parametrize("deep", ["def f(): f()\nf()", "def f(n): return [f(n)] + sorted([1], key=f)\nf(1)"])
def test_recursion_without_end(sandbox, deep):
    result = run(sandbox, "import sys; sys.setrecursionlimit(10**9)\n" + deep)
    assert result.status in ("memory", "crash", "cpu", "timeout") and well(sandbox)


def test_files_outside_are_neither_written_nor_read(sandbox, tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    os.chmod(kept, 0o666)
    os.chmod(tmp_path, 0o777)
    attempts = [
        f"open({str(kept)!r}, 'w').write('x')", f"open({str(kept)!r}, 'a')", f"os.remove({str(kept)!r})",
        f"os.rename({str(kept)!r}, {str(tmp_path / 'b')!r})", f"os.truncate({str(kept)!r}, 0)",
        f"os.chmod({str(kept)!r}, 0)", f"os.mkdir({str(tmp_path / 'd')!r})",
        f"os.symlink('/', {str(tmp_path / 'l')!r})",
        f"os.link({str(kept)!r}, 'mine')", f"os.utime({str(kept)!r}, (0, 0))", f"shutil.rmtree({str(tmp_path)!r})",
        f"open({str(secret)!r}).read()", f"os.listdir({str(tmp_path)!r})", "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()", "open('/dev/shm/x', 'w')", "os.mkfifo('/tmp/x')", "os.chroot('/')",
    ]  # fmt: skip
    code = "import os, shutil\nout = []\n" + "\n".join(
        f"try: {a}; out.append({a!r})\nexcept OSError: pass" for a in attempts
    )
    result = run(sandbox, code, calls=("out",))
    assert result.values == ("[]",), result
    assert kept.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["kept.txt", "secret.txt"]
    inside = run(sandbox, "import os; os.mkdir('d'); open('d/a', 'w').write('x'); os.rename('d/a', 'b')")
    assert inside.ok, inside


def test_the_private_folder_has_a_bound_and_goes(sandbox):
    result = run(sandbox, "for i in range(100): open(str(i), 'w').write('x' * 1_000_000)")
    assert result.status == "error" and ("No space" in result.error or "too large" in result.error)
    result = run(sandbox, "import os\nfor i in range(60): os.mkdir('d'); os.chdir('d')\nopen('x', 'w')")
    assert result.ok
    worker = next(iter(os.scandir(sandbox._folder))).path
    assert os.listdir(worker) == []
    big = Limits(wall_seconds=20, file_bytes=1000)
    assert run(sandbox, "open('a', 'w').write('x' * 10_000)", limits=big).status in ("error", "crash")


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.create_connection(('127.0.0.1', PORT), 1)",
        "urllib.request.urlopen('http://127.0.0.1:PORT')", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "asyncio.run(asyncio.open_connection('127.0.0.1', PORT))",
    ],
)  # fmt: skip
def test_no_network(sandbox, attempt):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        attempt = attempt.replace("PORT", str(server.getsockname()[1]))
        code = (
            f"import socket, urllib.request, asyncio\nr = 'open'\ntry: {attempt}\n"
            "except OSError as error: r = type(error).__name__"
        )
        result = run(sandbox, code, calls=("r",))
        assert result.ok and result.values[0] != "'open'", result
        with pytest.raises(TimeoutError):
            server.accept()


def test_asyncio_works_without_a_network(sandbox):
    code = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 3"
    assert run(sandbox, code, calls=("asyncio.run(f())",)).values == ("3",)


def test_no_secrets_in_the_environment(sandbox, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "hunter2")
    with Sandbox(limits=LIMITS) as fresh:
        result = fresh.run("import os", calls=["dict(os.environ)", "os.environ.get('A_TOKEN')"])
    assert "hunter2" not in result.values[0] and result.values[1] == "None"


@pytest.mark.parametrize(
    "attempt",
    [
        "os.kill(os.getppid(), 9)", "os.kill(PARENT, 9)", "os.kill(0, 9)", "os.kill(-1, 9)", "os.killpg(0, 9)",
        "os.killpg(os.getpgid(os.getppid()), 9)", "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        # the kernel would send the signal in the program's name
        "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    ],
)  # fmt: skip
def test_parents_are_unharmed(sandbox, attempt):
    attempt = attempt.replace("PARENT", str(os.getpid()))
    code = f"import os, signal, fcntl\nr = 'done'\ntry: {attempt}\nexcept OSError: r = 'refused'"
    assert run(sandbox, code, calls=("r",)).values == ("'refused'",)
    assert well(sandbox)


def test_output_without_end(sandbox):
    for stream in ("stdout", "stderr"):
        result = run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
        assert result.status == "output" and len(getattr(result, stream)) <= LIMITS.output_bytes
    assert run(sandbox, "x = 'a' * 10**6", calls=("x",)).status == "output"
    assert run(sandbox, "print('x' * 90_000)").ok


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()",
        "import os; os.write(3, b'nonsense'); os._exit(0)", "import os; os.write(3, b'[' * 90_000); os._exit(0)",
        'import os; os.write(3, b\'{"status": "ok", "tests": [1, {}]}\'); os._exit(0)',
        "import os; os.write(3, b'\\xff\\xfe'); os._exit(0)",
    ],
)  # fmt: skip
def test_leaving_early_is_no_success(sandbox, code):
    result = run(sandbox, code, tests=("assert True",))
    assert result.status == "exit" and not result.passed
    assert not run(sandbox, "def f(): raise SystemExit", tests=("f()",)).passed


def test_crash(sandbox):
    result = run(sandbox, "import ctypes; ctypes.string_at(0)")
    assert result.status == "crash" and well(sandbox)


def test_two_runs_tell_what_depends_on_chance(sandbox):
    for code, steady in [
        ("print(sorted({'a', 'b', 'c'}))", True),
        ("print(list({'abc', 'bcd', 'cde', 'def', 'efg', 'fgh'}))", False),
        ("print(object())", False),
        ("import random; print(random.random())", False),
        ("import random; random.seed(1); print(random.random())", True),
        ("import time; print(time.time_ns())", False),
    ]:
        first, second = sandbox.run_twice(Program(code))
        assert first.ok and (first.observed == second.observed) == steady, code
    said = run(sandbox, "print({'a', 'b', 'c'}, hash('x'))").stdout
    with Sandbox(limits=LIMITS) as other:
        assert run(other, "print({'a', 'b', 'c'}, hash('x'))").stdout == said


def test_map_keeps_the_order_and_uses_all_workers():
    with Sandbox(workers=3, limits=LIMITS) as box:
        programs = (Program(f"import time; time.sleep({(i % 3) / 50})", calls=(str(i),)) for i in range(30))
        assert [r.values[0] for r in box.map(programs)] == [str(i) for i in range(30)]
        assert len(box._all) == 3
        pids = [w._process.pid for w in box._all]
        folder = box._folder
    assert not os.path.exists(folder)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(SandboxError, match="closed"):
        box.run("x = 1")


def test_a_worker_that_dies_is_replaced():
    with Sandbox(limits=LIMITS) as box:
        well(box)
        timer = threading.Timer(0.5, lambda: os.killpg(box._all[0]._process.pid, 9))
        timer.start()
        result = box.run(Program("import time; time.sleep(15)"))
        assert result.status == "lost" and not result.ok
        assert well(box)


def test_workers_end_with_their_parent(tmp_path):
    """A parent that is killed leaves no process behind."""
    code = (
        "import os, sys\nfrom trainwright.core.sandbox import Sandbox\nbox = Sandbox()\nbox.run('x = 1')\n"
        "print(box._all[0]._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or " Z " in stat.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the worker lives on")


def test_paths_are_readable_and_imported_from(tmp_path):
    (tmp_path / "mine.py").write_text("value = 5")
    with Sandbox(limits=LIMITS, paths=[tmp_path]) as box:
        assert box.run("import mine", calls=["mine.value"]).values == ("5",)
        assert box.run(f"open({str(tmp_path / 'mine.py')!r}, 'w')").error_type in ("PermissionError", "OSError")


def test_guarantees_say_what_holds(sandbox):
    said = sandbox.guarantees()
    assert "seccomp" in said["processes"] and "seccomp" in said["network"] and said["environment"] == "empty"
    assert ("Landlock" in said["reading"]) == bool(_landlock.version())
    with Sandbox(isolation="audit") as box:
        assert "audit hook" in box.guarantees()["network"] and box.guarantees()["reading"] == "free"


def test_without_landlock_nothing_is_written(tmp_path):
    """The filter for kernels without Landlock, in a process of its own."""
    code = (
        "import os, sys\nfrom trainwright.core.sandbox import _seccomp\nos.chdir(sys.argv[1])\n_seccomp.install(0)\n"
        "out = []\nfor f in (lambda: open('a', 'w'), lambda: os.mkdir('b'), lambda: os.remove('k'), "
        "lambda: os.open('k', os.O_RDWR), lambda: os.truncate('k', 0), lambda: os.rename('k', 'l')):\n"
        "    try: f(); out.append('done')\n    except PermissionError: out.append('refused')\n"
        "print(open('k').read(), out)"
    )
    (tmp_path / "k").write_text("kept")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"kept {['refused'] * 6}\n", done.stderr


def test_audit_mode_stops_mistakes(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    with Sandbox(limits=LIMITS, isolation="audit") as box:
        assert well(box)
        for attempt in (
            f"open({str(kept)!r}, 'w')", f"os.remove({str(kept)!r})", "socket.create_connection(('127.0.0.1', 9))",
            "subprocess.run(['true'])", "os.fork()", "os.kill(os.getppid(), 15)", "os.system('true')",
            "ctypes.CDLL(None)",
        ):  # fmt: skip
            result = box.run(f"import os, socket, subprocess, ctypes\n{attempt}")
            assert result.error_type == "PermissionError", (attempt, result)
        assert box.run("open('mine', 'w').write('x')").ok
        assert box.run("while True: pass").timed_out
    assert kept.read_text() == "kept"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_bubblewrap_is_used_where_it_works():
    with Sandbox(limits=LIMITS) as box:
        assert well(box)
        assert "bubblewrap" in box.guarantees()["network"]
        assert box.run("open('a', 'w').write('x' * 1000)").ok
        assert box.run("import os", calls=["os.getppid()"]).values != (str(os.getpid()),)
        assert box.run("for i in range(100): open(str(i), 'w').write('x' * 1_000_000)").status == "error"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"isolation": "none"}, "allow_unsandboxed"),
        ({"isolation": "docker"}, "kernel, audit or none"),
        ({"workers": 0}, "at least 1"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        Sandbox(**settings)
    with pytest.raises(ConfigError, match="wall_seconds"):
        Limits(wall_seconds=0)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(_seccomp, "supported", lambda: False)
    with pytest.raises(ConfigError, match="seccomp"):
        Sandbox()


def test_unsandboxed_only_by_two_words():
    with Sandbox(isolation="none", allow_unsandboxed=True, limits=LIMITS) as box:
        assert well(box) and "nothing" in json.dumps(box.guarantees())
