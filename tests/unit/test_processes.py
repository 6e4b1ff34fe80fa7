"""Child processes: their logs, their end, and that they never outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from draftline.cluster.processes import ChildProcess, ChildProcessFailed


def wait_until_gone(pid: int, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def wait_for_text(file: Path, text: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while text not in (file.read_text() if file.exists() else ""):
        assert time.monotonic() < deadline, f"{text!r} never came up in {file}"
        time.sleep(0.01)


def test_output_goes_to_the_log_and_the_tail_is_this_childs(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    for word in ("first", "second"):
        child = ChildProcess(["sh", "-c", f"echo {word} out; echo {word} err >&2; exit 3"], log_file=log)
        assert child.wait(10.0) == 3
        assert child.log_tail() == f"{word} out\n{word} err"
    assert child.log_tail(lines=1) == "second err"
    assert log.read_text().startswith("first out")


def test_an_ended_child_is_reported_with_its_log(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", "echo no such device; exit 7"], log_file=tmp_path / "log")
    child.wait(10.0)
    with pytest.raises(ChildProcessFailed, match=r"status 7(.|\n)*no such device"):
        child.require_running()


def test_a_missing_program_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessFailed, match="cannot start no-such-program"):
        ChildProcess(["no-such-program"], log_file=tmp_path / "log")


def test_stop_is_gentle_first(tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    child = ChildProcess(["sh", "-c", script], log_file=tmp_path / "log")
    wait_for_text(tmp_path / "log", "ready")
    child.require_running()
    assert child.stop() == 0
    assert child.log_tail(1) == "bye"
    assert child.stop() == 0  # once more changes nothing


def test_stop_kills_what_will_not_end_and_its_children(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 100 & echo $!; wait; sleep 100"
    with ChildProcess(["sh", "-c", script], log_file=tmp_path / "log") as child:
        wait_for_text(tmp_path / "log", "\n")
        grandchild = int(child.log_tail())
        assert child.stop(grace_s=0.2) == -signal.SIGKILL
    assert wait_until_gone(grandchild)


def test_a_child_dies_with_its_parent_but_not_with_the_thread_that_asked(tmp_path: Path) -> None:
    program = """
import sys, threading, time
from pathlib import Path
from draftline.cluster.processes import ChildProcess
made = []
thread = threading.Thread(target=lambda: made.append(ChildProcess(["sleep", "100"], log_file=Path(sys.argv[1]))))
thread.start(); thread.join(); time.sleep(0.2)
print(made[0].pid, made[0].poll(), flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", program, tmp_path / "log"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, status = parent.stdout.readline().split()
    assert status == "None"
    assert os.getpgid(int(pid)) == int(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(int(pid))


def test_environment_is_the_given_one(tmp_path: Path) -> None:
    child = ChildProcess(["/bin/sh", "-c", "echo $WORD"], log_file=tmp_path / "log", env={"WORD": "draft"})
    child.wait(10.0)
    assert child.log_tail() == "draft"
