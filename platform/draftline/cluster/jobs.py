"""Submits the pipeline as a Ray job, follows its log and hands back its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import draftline
from draftline.cluster.local import Cluster
from draftline.errors import InputError

PACKAGE_ROOT = Path(draftline.__file__).resolve().parents[1]
CHECKOUT = PACKAGE_ROOT.parent
STOPPED_STATUS = 130
_UPLOAD_EXCLUDES = [".git/", ".venv/", "/runs/", ".cache/", "tests/", "build/", "__pycache__/"]
_RECONNECT_S = 1.0
_ASK_LIMIT_S = 15.0
_STOP_LIMIT_S = 60.0


def pipeline_command(
    python: str, script: str, recipe: str, overrides: Sequence[str], serve: str, until: str | None = None
) -> list[str]:
    """The job's command line."""
    settings = [part for override in overrides for part in ("--set", override)]
    return [python, script, recipe, *settings, "--serve", serve, *(["--until", until] if until else [])]


class PipelineJob:
    """One submitted run of the pipeline. Needs a checkout: the job's script is `jobs/pipeline.py`."""

    def __init__(
        self, cluster: Cluster, recipe_file: Path, overrides: Sequence[str], serve: str, until: str | None = None
    ) -> None:
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)
        try:
            self._client = JobSubmissionClient(cluster.jobs_address)
        except Exception as error:  # Ray says it in many ways, some of which repeat the whole address
            if cluster.started_here:
                raise
            raise InputError(
                f"{cluster.name}: found no Ray cluster there that takes jobs ({type(error).__name__}); allowed: the "
                "address of a running one, as --address or RAY_ADDRESS, or none"
            ) from error
        submission = _local_job if cluster.local else _remote_job
        self.id = self._client.submit_job(**submission(cluster, recipe_file, overrides, serve, until))

    def follow(self, stream: TextIO) -> int:
        """Copies the job's log to `stream` until the job has ended; returns the exit status for the caller.

        SIGINT and SIGTERM stop the job, and its clean-up is waited for; the second one gives up waiting.
        """
        return asyncio.run(self._follow(stream))

    async def _follow(self, stream: TextIO) -> int:
        loop = asyncio.get_running_loop()
        following = asyncio.ensure_future(self._copy_log(stream))
        stopping: list[asyncio.Future[Any]] = []

        def asked_to_stop() -> None:
            if stopping:
                following.cancel()
                return
            stream.write("\nstopping the run; once more to stop without waiting\n")
            stream.flush()
            stopping.append(asyncio.ensure_future(self._stop(following)))

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked_to_stop)
        with contextlib.suppress(asyncio.CancelledError):
            await following
        return await asyncio.to_thread(self._exit_status, stream)

    async def _stop(self, following: asyncio.Future[Any]) -> None:
        asked = asyncio.ensure_future(asyncio.to_thread(self._client.stop_job, self.id))
        with contextlib.suppress(TimeoutError, RuntimeError, OSError):  # Ray that does not answer is ended all the same
            await asyncio.wait_for(asked, timeout=_ASK_LIMIT_S)
            await asyncio.wait([following], timeout=_STOP_LIMIT_S)
        following.cancel()

    async def _copy_log(self, stream: TextIO) -> None:
        copied = 0
        while True:
            with contextlib.suppress(RuntimeError, OSError):  # the connection broke: the job decides whether to go on
                seen = 0
                async for text in self._client.tail_job_logs(self.id):
                    fresh = text[max(0, copied - seen) :]
                    seen += len(text)
                    copied = max(copied, seen)
                    stream.write(fresh)
                    stream.flush()
            if (await asyncio.to_thread(self._client.get_job_status, self.id)).is_terminal():
                return
            await asyncio.sleep(_RECONNECT_S)

    def _exit_status(self, stream: TextIO) -> int:
        try:
            info = self._client.get_job_info(self.id)
        except (RuntimeError, OSError) as error:
            stream.write(f"Ray does not say how the job ended: {str(error).splitlines()[0]}\n")
            return STOPPED_STATUS
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        if str(info.status.value) == "FAILED":
            stream.write(f"the job could not run: {info.message}\n")
            return 1
        return STOPPED_STATUS


def _local_job(
    cluster: Cluster, recipe_file: Path, overrides: Sequence[str], serve: str, until: str | None
) -> dict[str, Any]:
    # Nothing is uploaded: the driver works in this folder, on these files. Ray's own guess at the cluster's address
    # may find another cluster of this machine, hence the prefix.
    command = pipeline_command(sys.executable, str(_script()), str(recipe_file.resolve()), overrides, serve, until)
    prefix = ["exec", "env", f"RAY_ADDRESS={cluster.gcs_address}"]
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "entrypoint": f"cd {shlex.quote(os.getcwd())} && {shlex.join(prefix)} {shlex.join(command)}",
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
    }


def _remote_job(
    cluster: Cluster, recipe_file: Path, overrides: Sequence[str], serve: str, until: str | None
) -> dict[str, Any]:
    if not recipe_file.resolve().is_relative_to(CHECKOUT):
        raise InputError(
            f"{recipe_file}: the cluster at {cluster.name} is elsewhere and is sent {CHECKOUT} only; "
            "put the recipe and its prompts below that folder"
        )
    recipe = recipe_file.resolve().relative_to(CHECKOUT).as_posix()
    _script()
    command = pipeline_command("python", "jobs/pipeline.py", recipe, overrides, serve, until)
    return {
        "entrypoint": f"exec {shlex.join(command)}",
        "runtime_env": {"working_dir": str(CHECKOUT), "excludes": _UPLOAD_EXCLUDES},
    }


def _script() -> Path:
    script = CHECKOUT / "jobs" / "pipeline.py"
    if not script.is_file():
        raise InputError(f"{script} is missing: `draftline run` works from a checkout of the project")
    return script
