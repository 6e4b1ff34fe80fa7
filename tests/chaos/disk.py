"""A small disk of its own for a run's store, and what fills it up."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

_CHUNK = b"\0" * 4096


class FullDisk:
    """A tmpfs at a folder. Needs the right to mount; `refused` says why it has none."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder = folder
        self._filler = folder / "filler"
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "draftline-chaos", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            self.refused = done.stderr.strip() or None if done.returncode else None
        except FileNotFoundError as error:
            self.refused = str(error)

    def fill(self) -> None:
        """Takes all the room that there is now."""
        with self._filler.open("ab", buffering=0) as file:
            while True:
                try:
                    file.write(_CHUNK)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self) -> None:
        """Gives the room back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts; what was stored there is gone."""
        if self.refused is None:
            subprocess.run(["umount", str(self._folder)], check=True)
            os.rmdir(self._folder)
