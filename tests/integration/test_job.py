"""The way of a run through Ray's job server: log, exit status, stopping, and that nothing remains."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from leftovers import abandoned_segments, family, listening, wait_for

DRIVER = """
import os, sys, time
from pathlib import Path
import ray
from draftline.cluster.processes import ChildProcess
from draftline.runs.stopping import StopRequested, install_stop_handlers

print("arguments", sys.argv[1:], "in", os.getcwd(), flush=True)
if Path(sys.argv[1]).name == "refused":
    sys.exit(2)
context = ray.init(logging_level="warning")
assert os.environ["RAY_ADDRESS"] == context.address_info["gcs_address"]
install_stop_handlers()

@ray.remote(num_cpus=0.5)
class Owner:
    def start(self, log_file):
        self.child = ChildProcess(["sleep", "1000"], log_file=Path(log_file))
        return self.child.pid

owner = Owner.remote()
print("child", ray.get(owner.start.remote(sys.argv[1] + ".log")), flush=True)
try:
    print("working", flush=True)
    time.sleep(1000)
except StopRequested:
    time.sleep(0.5)
    print("cleaned up", flush=True)
    raise SystemExit(130)
"""

SUBMIT = """
import sys
from pathlib import Path
from draftline.cluster import jobs
from draftline.cluster.local import ray_cluster
from draftline.runs.stopping import install_stop_handlers

jobs.CHECKOUT = Path(sys.argv[1])
install_stop_handlers()
with ray_cluster("local") as cluster:
    for recipe in sys.argv[2:]:
        job = jobs.PipelineJob(cluster, Path(recipe), ["seed=1"], "end")
        print("status", job.follow(sys.stdout), flush=True)
"""


@pytest.mark.timeout(180)
def test_refusal_and_stop_come_through_and_nothing_remains(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "pipeline.py").write_text(DRIVER)
    log = tmp_path / "out.txt"
    shared_before = abandoned_segments()
    with log.open("w") as out:
        command = [sys.executable, "-c", SUBMIT, str(tmp_path), "refused", "long"]
        submitter = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        said = wait_for(log, "working")
        assert f"arguments ['{tmp_path}/refused', '--set', 'seed=1', '--serve', 'end'] in {tmp_path}" in said
        assert "status 2" in said
        processes = family(submitter.pid)
        ports = {port for port, pid in listening() if pid in processes}
        child = int(said.split("child ")[1].split()[0])
        assert child in processes
        assert len(ports) >= 3
        submitter.send_signal(signal.SIGTERM)
        assert submitter.wait(60) == 0
    finally:
        submitter.kill()
        submitter.wait()
    said = log.read_text()
    assert "cleaned up" in said
    assert "status 130" in said
    assert not [pid for pid in processes if psutil.pid_exists(pid)]
    assert not ports & {port for port, _ in listening()}
    assert not abandoned_segments() - shared_before
