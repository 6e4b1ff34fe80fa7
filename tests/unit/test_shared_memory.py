"""What dead engines leave in shared memory goes; what anybody still uses, or made before, stays."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from draftline.cluster.shared_memory import remove_abandoned


def test_only_what_is_abandoned_is_removed(tmp_path: Path) -> None:
    (tmp_path / "psm_older").write_bytes(b"x" * 16)
    time.sleep(0.05)
    began = time.time()
    time.sleep(0.05)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"__KMP_REGISTERED_LIB_{dead.pid}_0", f"__KMP_REGISTERED_LIB_{os.getpid()}_0", "other"):
        (tmp_path / name).touch()
    for name in ("psm_used", "psm_left", "sem.mp-left"):
        (tmp_path / name).write_bytes(b"x" * 16)
    with (tmp_path / "psm_used").open("r+b") as used, mmap.mmap(used.fileno(), 0):
        assert remove_abandoned(began, tmp_path) == [f"__KMP_REGISTERED_LIB_{dead.pid}_0", "psm_left", "sem.mp-left"]
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {f"__KMP_REGISTERED_LIB_{os.getpid()}_0", "other", "psm_older", "psm_used"}
