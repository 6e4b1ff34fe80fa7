"""One attempt at the training: the feeder, the worker group and what watches over them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from draftline.errors import RunFailed, one_line
from draftline.hidden_states.feeder import start_feeder
from draftline.hidden_states.skip_list import SkipList
from draftline.recipe.sizes import states_shape
from draftline.runs.context import RunContext
from draftline.runs.material import draft_vocabulary, provenance
from draftline.runs.policy import Action, Cause
from draftline.runs.stopping import stop_behind
from draftline.samples.plan import BatchPlan
from draftline.samples.rows import Sample
from draftline.storage.ray_storage import ray_storage
from draftline.training.failures import FeederGone, cause_of
from draftline.training.run import training_actor
from draftline.training.spec import TrainingResult, TrainingSpec, token_digest

POLL_S = 1.0
LAST_WORDS_S = 5.0  # Ray Train's controller looks after its workers every 2 s
FEEDER, BOARD, WORKERS = "feeder", "progress board", "train workers"


class TrainingAttempt:
    """Everything of one attempt is started by `run` and ended by it; `number` is new for each attempt of a stage."""

    def __init__(self, context: RunContext, samples: Sequence[Sample], plan: BatchPlan, number: int) -> None:
        self._context, self._samples, self._plan, self._number = context, samples, plan, number
        self._incidents = 0  # of the feeder's that the record has
        self._losses = 0  # of the worker group's that the record has

    def run(self) -> TrainingResult:
        """Trains to the end. When the run is asked to stop, training ends with a checkpoint first.

        Raises BudgetSpent when losses are more than the recipe allows, and what ended the training.
        """
        import ray

        actors = self._context.actors
        actors.replace_dead_master()
        actors.replace_dead_replicas(wait=True)
        try:
            feeder, board = self._start_feeder(), actors.own(BOARD, progress_board())
            result = self._start_workers(feeder, board)
            try:
                while not ray.wait([result], timeout=POLL_S)[0]:
                    stats = _ask_feeder(feeder.stats.remote())
                    self._show(ray.get(board.latest.remote()), stats)
                    self._record_losses(ray.get(board.losses.remote()))
                    self._mend(feeder, stats)
                trained: TrainingResult = ray.get(result)
                self._hear_of_workers(board, result)
            except BaseException as error:
                if stop_behind(error):
                    self._stop_with_checkpoint(feeder, result)
                elif cause_of(error) not in ("workers", "stage"):
                    self._hear_of_workers(board, result)
                self._hear_of_feeder(feeder)
                raise
            for damaged in trained.damaged_checkpoints:
                self._context.frame.note(Cause.STORAGE, f"checkpoint {damaged}", "passed over", "an older one is whole")
            self._record(_ask_feeder(feeder.stats.remote()))
            if trained.stopped_at is not None:
                raise RunFailed(f"training ended after step {trained.stopped_at} although nobody asked for it")
            return trained
        finally:
            for name in (WORKERS, FEEDER, BOARD):
                actors.end(name)

    def _start_feeder(self) -> Any:
        context, recipe = self._context, self._context.recipe
        workspace, folder = context.frame.workspace, context.frame.folder
        return context.actors.own(
            FEEDER,
            start_feeder(
                plan=self._plan,
                token_ids={sample.number: sample.token_ids for sample in self._samples},
                replicas=context.actors.replicas(),
                store=context.actors.store(),
                states=recipe.hidden_states,
                shape=states_shape(recipe, context.target),
                key_prefix=context.key("states", self._number),
                master=context.actors.master(),
                predecessors=[context.key("states", earlier) for earlier in range(self._number)],
                skip_list=SkipList(workspace.store, f"{workspace.prefix}/{workspace.name(folder.skip_list)}"),
                # Extraction need not wait for the workers to start, unless a checkpoint will say where they begin.
                begin_at=None if workspace.names("checkpoints") else self._plan.held_out_positions,
            ),
        )

    def _start_workers(self, feeder: Any, board: Any) -> Any:
        context, recipe = self._context, self._context.recipe
        workspace = context.frame.workspace
        spec = TrainingSpec(
            recipe=recipe,
            target=str(context.target.path),
            kept_tokens=draft_vocabulary(context, self._samples),
            mask_token_id=context.mask_token_id,
            steps=self._plan.steps,
            held_out_positions=self._plan.held_out_positions,
            prompt_tokens={sample.number: sample.prompt_tokens for sample in self._samples},
            checkpoints=str(context.frame.folder.checkpoints.resolve()),
            provenance=provenance(context),
            token_digests={sample.number: token_digest(sample.token_ids) for sample in self._samples},
            feeder=feeder,
            store=context.actors.store(),
            board=board,
            workspace=workspace,
        )
        driver = context.actors.own(WORKERS, training_actor())
        path, filesystem = ray_storage(workspace.store, f"{workspace.prefix}/ray_train")
        return driver.run.remote(
            spec, path, filesystem, max_failures=recipe.failures.workers, attempt=context.key("train", self._number)
        )

    def _mend(self, feeder: Any, stats: dict[str, Any]) -> None:
        """Records what the feeder met, and replaces what is lost for good."""
        import ray

        self._record(stats)
        actors = self._context.actors
        if (master := actors.replace_dead_master()) is not None:
            _ask_feeder(feeder.attach_master.remote(master))
        if stats["replicas"] == self._context.recipe.hidden_states.replicas:
            return
        try:
            fresh = actors.replace_dead_replicas(wait=False)
        except ray.exceptions.RayError as error:
            self._context.frame.recover(Cause.REPLICA, f"a target replica was lost while it started: {one_line(error)}")
            return
        for replica in fresh:
            _ask_feeder(feeder.add_replica.remote(replica))

    def _record(self, stats: dict[str, Any]) -> None:
        for cause, what in self._fresh_incidents(stats):
            if cause is Cause.STATE:
                self._note_state(what)
            else:
                self._context.frame.recover(cause, what)

    def _fresh_incidents(self, stats: dict[str, Any]) -> list[tuple[Cause, str]]:
        """What the feeder has met since it was last asked; its figures go into the record."""
        figures = {f"train.{name}": value for name, value in stats.items() if isinstance(value, int | float)}
        self._context.frame.record.figures.update(figures)
        fresh, self._incidents = int(stats["incidents_total"]) - self._incidents, int(stats["incidents_total"])
        return [(Cause(cause), what) for cause, what in stats["incidents"][-fresh:]] if fresh else []

    def _note_state(self, what: str) -> None:
        self._context.frame.note(Cause.STATE, what, "captured again", "limited by hidden_states.attempts")

    def _record_losses(self, losses: Sequence[str]) -> None:
        fresh, self._losses = losses[self._losses :], len(losses)
        for what in fresh:
            self._context.frame.recover(Cause.WORKERS, f"{what}; all start again from the last checkpoint")

    def _hear_of_workers(self, board: Any, result: Any) -> None:
        """Records train workers that were lost just before the attempt ended, perhaps by another loss. Bounded."""
        import ray

        end, heard = time.monotonic() + LAST_WORDS_S, self._losses
        while True:
            ended = bool(ray.wait([result], timeout=POLL_S)[0])
            try:
                losses = ray.get(board.losses.remote(), timeout=LAST_WORDS_S)
            except (ray.exceptions.RayError, TimeoutError):  # what the board knew went with it
                return
            self._record_losses(losses)
            if ended or self._losses > heard or time.monotonic() > end:
                return

    def _hear_of_feeder(self, feeder: Any) -> None:
        """Records what the feeder met since it was last asked, if it still lives: the attempt has failed already."""
        import ray

        try:
            stats = ray.get(feeder.stats.remote(), timeout=LAST_WORDS_S)
        except (ray.exceptions.RayError, TimeoutError):  # what it knew went with it
            return
        for cause, what in self._fresh_incidents(stats):
            if cause is Cause.STATE:
                self._note_state(what)
            else:
                self._context.frame.note(cause, what, Action.RECOVER, "this attempt at the training ended with it")

    def _stop_with_checkpoint(self, feeder: Any, result: Any) -> None:
        """Has training end at the next step that all ranks can reach, with a checkpoint. Bounded; never raises."""
        import ray

        grace_s, progress = self._context.recipe.failures.grace_s, self._context.frame.progress
        began = time.monotonic()
        try:
            ray.get(feeder.finish_early.remote(), timeout=grace_s)
            trained: TrainingResult = ray.get(result, timeout=max(0.1, grace_s - (time.monotonic() - began)))
        except (ray.exceptions.RayError, TimeoutError) as error:
            progress.say(f"no last checkpoint within {grace_s:g} s ({one_line(error)}); the one before stands")
            return
        step = self._plan.steps if trained.stopped_at is None else trained.stopped_at
        progress.say(f"checkpoint of step {step} is written ({time.monotonic() - began:.1f} s)")

    def _show(self, update: dict[str, Any] | None, stats: dict[str, Any]) -> None:
        progress = self._context.frame.progress
        if update is None:
            progress.update({"unit": "captured sample", "done": stats["captured_samples"]})
            return
        shown: dict[str, float] = {key: update[key] for key in ("loss", "eal", "eal_held_out", "lr") if key in update}
        progress.update({"unit": "step", "done": update["step"], "total": update["steps"], **shown})


class _ProgressBoard:
    """Where rank 0 leaves its latest figures for the driver to show, and Ray Train's controller what it lost."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] | None = None
        self._losses: list[str] = []

    def update(self, figures: dict[str, Any]) -> None:
        self._latest = figures

    def latest(self) -> dict[str, Any] | None:
        return self._latest

    def lost(self, what: str) -> None:
        self._losses.append(what)

    def losses(self) -> list[str]:
        return self._losses


def progress_board() -> Any:
    """A started actor: rank 0 calls `update(figures)`, Ray Train's controller `lost(what)`; the driver `latest()` and
    `losses()`."""
    import ray

    return ray.remote(_ProgressBoard).options(num_cpus=0).remote()


def _ask_feeder(answer: Any) -> Any:
    """What the feeder answers. Raises FeederGone when it is dead, and what it raises."""
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.RayActorError as error:
        raise FeederGone(one_line(error)) from error
