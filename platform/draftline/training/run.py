"""Starts the Ray Train worker group of a run and waits for its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftline.errors import one_line
from draftline.training.failures import TrainingFailed, cause_of, origin
from draftline.training.spec import TrainingResult, TrainingSpec

if TYPE_CHECKING:
    from ray.train import ScalingConfig

CONTROLLER_FAILURES = 3
KEPT_POINTERS = 2


def run_training(
    spec: TrainingSpec,
    storage_path: str,
    storage_filesystem: Any = None,
    *,
    attempt: str = "0",
    max_failures: int = 0,
) -> TrainingResult:
    """Trains the draft; blocks until done. Ray must be connected.

    `storage_path` is Ray Train's own place, on `storage_filesystem` (pyarrow's; None: a local folder). `attempt` must
    be new each time: Ray Train would go on with what it finds under its old name, and refuse to start where a
    checkpoint that it knows is gone. Failed workers are started again `max_failures` times, from the newest checkpoint,
    when that can help (see `failures.is_final`). It imports torch (Ray Train's torch backend does): a driver calls it
    through `training_actor`. Raises `TrainingFailed`, from what Ray Train raised.
    """
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    from draftline.training.fail_fast import FailFast
    from draftline.training.worker import train_worker

    # The controller's own failures, such as a placement that cannot be had, would be tried again for ever.
    failures = FailureConfig(  # type: ignore[call-arg] # of Ray Train's second version
        max_failures=max_failures, controller_failure_limit=CONTROLLER_FAILURES
    )
    gpu = spec.recipe.resources.accelerator == "gpu"
    trainer = TorchTrainer(
        train_worker,  # type: ignore[arg-type] # Ray Train's second version takes what it returns
        train_loop_config={"spec": spec},
        scaling_config=_scaling(spec, gpu),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
        run_config=RunConfig(
            name=f"{spec.recipe.run_id}-train-{attempt}",
            storage_path=str(storage_path),
            storage_filesystem=storage_filesystem,
            failure_config=failures,
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT_POINTERS),
            callbacks=[FailFast(spec.board)],  # type: ignore[list-item] # of Ray Train's second version
        ),
    )
    try:
        returned = trainer.fit().return_value  # type: ignore[attr-defined] # of Ray Train's second version
    except TrainingFailedError as error:
        raise TrainingFailed(cause_of(error), one_line(origin(error))) from error
    if returned is None:
        raise RuntimeError("the train workers ended without a result")
    return TrainingResult(**returned)


def _scaling(spec: TrainingSpec, gpu: bool) -> ScalingConfig:
    from ray.train import ScalingConfig

    resources: dict[str, float] = {"CPU": spec.recipe.resources.cpus_per_actor}
    if gpu:
        resources["GPU"] = 1
    return ScalingConfig(num_workers=spec.recipe.training.workers, use_gpu=gpu, resources_per_worker=resources)


class _TrainingDriver:
    """Holds `run_training` in a process of its own, so that the run's driver never imports torch.

    The worker group belongs to this process and dies with it.
    """

    def run(
        self,
        spec: TrainingSpec,
        storage_path: str,
        storage_filesystem: Any = None,
        attempt: str = "0",
        max_failures: int = 0,
    ) -> TrainingResult:
        """See `run_training`."""
        return run_training(spec, storage_path, storage_filesystem, attempt=attempt, max_failures=max_failures)


def training_actor() -> Any:
    """A started actor with `run(...)`, as `run_training`; it takes no CPU of Ray's count."""
    import ray

    return ray.remote(_TrainingDriver).options(num_cpus=0, max_restarts=0).remote()
