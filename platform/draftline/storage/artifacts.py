"""Where a run's files lie below its working folder, and what a recipe's `store` names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.storage.files import user_path
from draftline.storage.keys import names_a_folder

_RAY_UPLOADS = "working_dir_files"  # the folder that Ray unpacks working directories in


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run on this machine. Nothing is made on disk until it is written."""

    path: Path

    @property
    def samples(self) -> Path:
        """Folder of the samples, Parquet."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Folder of the training checkpoints."""
        return self.path / "checkpoints"

    @property
    def skip_list(self) -> Path:
        """The samples that could not be extracted; kept in the store alone."""
        return self.path / "skipped.json"

    @property
    def draft(self) -> Path:
        """Folder of the exported draft."""
        return self.path / "draft"

    @property
    def report(self) -> Path:
        """Folder of what evaluation measured."""
        return self.path / "report"

    @property
    def logs(self) -> Path:
        """Folder of the logs of child processes."""
        return self.path / "logs"


def store_url(store: str) -> str:
    """What `open_store` takes for a recipe's `store`: a folder becomes absolute, from the working directory.

    Ray deletes the working directory of a job that was sent one, so a folder there is kept below `~/draftline`.
    Raises InputError for a path that cannot be.
    """
    if not names_a_folder(store):
        return store
    here = Path.cwd()
    base = Path.home() / "draftline" if was_uploaded(here) else here
    return str(user_path(base, store, "store").absolute())


def was_uploaded(folder: Path) -> bool:
    """Whether a folder is Ray's copy of a working directory that was sent along with a job."""
    return _RAY_UPLOADS in folder.parts
