"""Where a run's files lie in the artifact store, a local folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.storage.files import sha256_file

_RAY_UPLOADS = "working_dir_files"  # the folder that Ray unpacks working directories in


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run: `<store>/<run_id>/...`. Nothing is made on disk until it is written."""

    store: Path
    run_id: str

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.store / self.run_id

    @property
    def record(self) -> Path:
        """The run record, JSON."""
        return self.path / "record.json"

    @property
    def recipe(self) -> Path:
        """The resolved recipe, YAML."""
        return self.path / "recipe.yaml"

    @property
    def samples(self) -> Path:
        """Folder of the samples, Parquet."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Folder of the training checkpoints."""
        return self.path / "checkpoints"

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

    def relative(self, path: Path) -> str:
        """`path` as the run record names it: relative to the run's folder, with `/`."""
        return path.relative_to(self.path).as_posix()

    def checksums(self, *paths: Path) -> dict[str, str]:
        """Hex sha256 of the given files and of every file below the given folders, by record name, sorted."""
        files = {file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if not file.is_dir()}
        return {self.relative(file): sha256_file(file) for file in sorted(files)}

    def damaged(self, outputs: dict[str, str]) -> list[str]:
        """Which of the outputs (record name -> sha256) are missing or have other bytes."""
        return [name for name, digest in outputs.items() if not self._verifies(self.path / name, digest)]

    def _verifies(self, file: Path, digest: str) -> bool:
        return file.is_file() and sha256_file(file) == digest


def run_ids(store: Path) -> list[str]:
    """The runs that have a record in the store, sorted; none when the store does not exist."""
    return sorted(record.parent.name for record in store.glob("*/record.json"))


def store_folder(store: str) -> Path:
    """The folder that a recipe's `store` names, absolute: relative to the working directory.

    Ray deletes the working directory of a job that was sent one, so a run there is kept below `~/draftline`.
    """
    here = Path.cwd()
    base = Path.home() / "draftline" if was_uploaded(here) else here
    return (base / Path(store).expanduser()).absolute()


def was_uploaded(folder: Path) -> bool:
    """Whether a folder is Ray's copy of a working directory that was sent along with a job."""
    return _RAY_UPLOADS in folder.parts
