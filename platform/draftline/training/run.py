"""Starts the Ray Train worker group of a run and waits for its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.training.spec import TrainingResult, TrainingSpec

if TYPE_CHECKING:
    from ray.train import ScalingConfig

CONTROLLER_FAILURES = 3


def run_training(spec: TrainingSpec, storage: Path, *, max_failures: int = 0) -> TrainingResult:
    """Trains the draft; blocks until done. Ray must be connected.

    `storage` is Ray Train's own folder. Failed workers are started again `max_failures` times, from the newest
    checkpoint. It imports torch (Ray Train's torch backend does): a driver calls it through `training_actor`.
    Raises `ray.train.TrainingFailedError`.
    """
    from ray.train import FailureConfig, RunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

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
            name=f"{spec.recipe.run_id}-train",
            storage_path=str(storage.resolve()),
            failure_config=failures,
        ),
    )
    returned = trainer.fit().return_value  # type: ignore[attr-defined] # of Ray Train's second version
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
    """Holds `run_training` in a process of its own, so that the run's driver never imports torch."""

    def run(self, spec: TrainingSpec, storage: Path, max_failures: int = 0) -> TrainingResult:
        """See `run_training`."""
        return run_training(spec, storage, max_failures=max_failures)

    def stop(self) -> None:
        """Nothing to end: the worker group belongs to this actor's process and dies with it."""


def training_actor() -> Any:
    """A started actor with `run(spec, storage, max_failures)`; it takes no CPU of Ray's count."""
    import ray

    return ray.remote(_TrainingDriver).options(num_cpus=0, max_restarts=0).remote()
