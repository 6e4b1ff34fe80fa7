"""The actors of one run: started when first wanted, all ended when the run ends. Their one owner."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftline.cluster.shared_memory import remove_abandoned
from draftline.errors import one_line
from draftline.hidden_states.replicas import HEALTH_TIMEOUT_S
from draftline.hidden_states.store import StoreConfig
from draftline.recipe.schema import Recipe
from draftline.recipe.sizes import cached_token_bytes
from draftline.runs.progress import Progress
from draftline.storage.artifacts import RunFolder
from draftline.targets.engine import Engine, engine_actor
from draftline.targets.engine_args import base_engine_args, capture_engine_args, engine_environment
from draftline.targets.replica import TargetReplica
from draftline.targets.resolve import ResolvedTarget

MASTER = "Mooncake master"
STOP_WAIT_S = 10.0
MASTER_START_S = 90.0
REQUEST_WAIT_S = 20.0  # less than the feeder waits for another master (watch.MASTER_WAIT_S)
LOOK_WAIT_S = 1.0
ENGINE_CONCURRENCY = 512
# Requests that an engine works on at once, and the tokens that its cache holds on a CPU: answering wants full batches,
# evaluation mostly asks one request at a time.
REPLICA_REQUESTS, REPLICA_CACHE_TOKENS = 64, 16384
EVALUATION_REQUESTS, EVALUATION_CACHE_TOKENS = 16, 4096


@dataclass(frozen=True, slots=True)
class _Loading:
    """A replica that loads the model; `ready` answers with the seconds that it took."""

    replica: Any
    ready: Any


class RunActors:
    """Context manager around the Mooncake master, the target replicas and the engines of one run."""

    def __init__(self, recipe: Recipe, target: ResolvedTarget, folder: RunFolder, progress: Progress) -> None:
        self.recipe = recipe
        self.target = target
        self._folder = folder
        self._progress = progress
        self._began = time.time()
        self._owned: dict[str, Any] = {}
        self._replicas: dict[str, Any] = {}
        self._loading: dict[str, _Loading] = {}
        self._fresh: list[Any] = []  # replicas that came up and were not asked for yet
        self._replicas_made = 0
        self._replicas_alone = True
        self._store: StoreConfig | None = None
        self._master_ports: tuple[int, int] | None = None  # a master that takes over wants the same

    def __enter__(self) -> RunActors:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all actors, the latest first; they start again when wanted again."""
        for name in reversed(list(self._owned)):
            self.end(name)
        self._replicas, self._loading, self._fresh = {}, {}, []
        self._store, self._replicas_alone = None, True
        remove_abandoned(self._began)

    @property
    def accelerator(self) -> Any:
        """Where engines and training run: `cpu` or `gpu`."""
        return self.recipe.resources.accelerator

    def own(self, name: str, actor: Any) -> Any:
        """Takes over an actor: it is stopped and killed when the run ends."""
        self._owned[name] = actor
        return actor

    def end(self, name: str) -> None:
        """Stops an actor by its own `stop` if it has one, then kills it, which also ends one that hangs.

        An actor that was never owned is none: whoever cleans up need not know how far the start came.
        """
        import ray

        actor = self._owned.pop(name, None)
        if actor is None:
            return
        try:
            if (stop := getattr(actor, "stop", None)) is not None:
                ray.get(stop.remote(), timeout=STOP_WAIT_S)
        except (ray.exceptions.RayError, TimeoutError) as problem:
            self._progress.say(f"{name} did not stop by itself ({type(problem).__name__}); killed")
        ray.kill(actor)

    def store(self) -> StoreConfig:
        """The hidden states' store; starts the Mooncake master when first asked."""
        if self._store is None:
            self._store = self._start_store()
        return self._store

    def master(self) -> Any:
        """The Mooncake master's actor."""
        self.store()
        return self._owned[MASTER]

    def replicas(self) -> list[Any]:
        """The target replicas; started when first asked, on all cores."""
        if not self._replicas:
            self.replace_dead_replicas(wait=True)
        return list(self._replicas.values())

    def replace_dead_replicas(self, *, wait: bool) -> list[Any]:
        """Ends the replicas that do not answer, has as many new ones load the model, and returns those that are up.

        With `wait` it returns once they all are, otherwise soon: who came up since the last call is returned then.
        Raises the RayError of a replica that was lost while it loaded; that one is ended, and the next call makes up
        for it.
        """
        import ray

        for name in self._dead_replicas(wait):
            del self._replicas[name]
            self.end(name)
        missing = self.recipe.hidden_states.replicas - len(self._replicas) - len(self._loading)
        if missing > 0:
            remove_abandoned(self._began)
            self._load_replicas(missing)
        if wait and self._loading:
            with self._progress.waiting("the target replicas to load the model"):
                ray.wait([each.ready for each in self._loading.values()], num_returns=len(self._loading))
        self._take_loaded()
        fresh, self._fresh = self._fresh, []
        return fresh

    def share_cores(self, alone: bool) -> None:
        """Gives the replicas all cores (they work alone), or what the recipe leaves them beside the trainer."""
        self._replicas_alone = alone
        self._set_threads(self._replicas)

    def replace_dead_master(self) -> Any | None:
        """When the master is beyond starting again: a new one, at the same address if that can be had.

        None: it lives, or was never asked for.
        """
        import ray

        if self._store is None:
            return None
        try:
            ray.get(self._owned[MASTER].ensure.remote(), timeout=MASTER_START_S)
            return None
        except (ray.exceptions.RayError, TimeoutError):
            self.end(MASTER)
        before = self._store.master_address
        self._store = self._start_store()
        if (address := self._store.master_address) != before:
            self._have_replicas(lambda replica: replica.rejoin.remote(address), self._replicas)
            for name in list(self._loading):  # they would join a store that is gone, and hear no `stop` while they load
                del self._loading[name]
                ray.kill(self._owned.pop(name))
        return self._owned[MASTER]

    def engine(self, name: str, engine_class: type[Engine], args: Mapping[str, Any], threads: int) -> Any:
        """One further engine of the target, with `args` beside those that every engine has."""
        import ray

        actor = self.own(
            name,
            self._engine_actor(name, engine_class, args, threads, EVALUATION_REQUESTS, EVALUATION_CACHE_TOKENS),
        )
        with self._progress.waiting(f"{name} to load the model"):
            seconds = ray.get(actor.start.remote())
        self._progress.say(f"{name} is up ({seconds:.0f} s)")
        return actor

    def _start_store(self) -> StoreConfig:
        import ray

        from draftline.hidden_states.master import MooncakeMaster

        master = self.own(MASTER, MooncakeMaster.remote(str(self._folder.logs)))  # type: ignore[attr-defined]
        address = ray.get(master.start.remote(self._master_ports))
        self._master_ports = ray.get(master.ports.remote())
        self._progress.say(f"Mooncake master at {address}")
        states = self.recipe.hidden_states
        return StoreConfig(
            master_address=address,
            segment_bytes=states.segment_bytes,
            buffer_bytes=states.buffer_bytes,
            protocol=states.protocol,
            devices=states.rdma_devices,
        )

    def _load_replicas(self, count: int) -> None:
        capture = capture_engine_args(
            self.recipe.draft.tap_layers,
            self.target.layers,
            self.store().connector_config(),
            accelerator=self.accelerator,
        )
        requests = 1 if self.recipe.extraction.deterministic else REPLICA_REQUESTS
        for _ in range(count):
            name = f"target replica {self._replicas_made}"
            self._replicas_made += 1
            replica = self.own(
                name,
                self._engine_actor(name, TargetReplica, capture, self._all_cores(), requests, REPLICA_CACHE_TOKENS),
            )
            self._loading[name] = _Loading(replica, replica.start.remote())

    def _take_loaded(self) -> None:
        """Those that have loaded the model take part. Raises the RayError of one that was lost instead."""
        import ray

        seconds: dict[str, float] = {}
        try:
            for name, loading in list(self._loading.items()):
                if not ray.wait([loading.ready], timeout=0)[0]:
                    continue
                del self._loading[name]
                try:
                    seconds[name] = ray.get(loading.ready)
                except ray.exceptions.RayError:
                    self.end(name)
                    raise
                self._replicas[name] = loading.replica
                self._fresh.append(loading.replica)
        finally:
            if seconds:
                self._progress.say(f"{len(seconds)} target replica(s) up ({max(seconds.values()):.0f} s)")
                self._set_threads(seconds)

    def _dead_replicas(self, wait: bool) -> list[str]:
        """Replicas whose actor or engine has died. One that does not say so in time counts as dead with `wait` only:
        while training runs, the feeder is patient with it."""
        problems = _problems(
            {name: replica.healthy.remote() for name, replica in self._replicas.items()},
            HEALTH_TIMEOUT_S if wait else LOOK_WAIT_S,
        )
        return [name for name, problem in problems.items() if wait or not isinstance(problem, TimeoutError)]

    def _set_threads(self, names: Iterable[str]) -> None:
        if self.accelerator == "cpu":
            threads = self._all_cores() if self._replicas_alone else self.recipe.hidden_states.threads
            self._have_replicas(lambda replica: replica.set_threads.remote(threads), names)

    def _have_replicas(self, request: Callable[[Any], Any], names: Iterable[str]) -> None:
        """Has the named replicas do something. One that does not is killed: whoever needs it has it replaced."""
        import ray

        asked = {name: request(self._replicas[name]) for name in names}
        for name, problem in _problems(asked, REQUEST_WAIT_S).items():
            self._progress.say(f"{name} does not answer: {one_line(problem)}")
            del self._replicas[name]
            ray.kill(self._owned.pop(name))

    def _engine_actor(
        self,
        name: str,
        engine_class: type[Engine],
        args: Mapping[str, Any],
        threads: int,
        requests: int,
        cache_tokens: int,
    ) -> Any:
        recipe = self.recipe
        longest = recipe.training.row_tokens + 1  # capturing asks for one token beyond the row
        base = base_engine_args(
            self.target.path,
            accelerator=self.accelerator,
            dtype=recipe.target.dtype,
            max_model_len=longest,
            max_requests=requests,
            kv_cache_bytes=max(cache_tokens, 2 * longest) * cached_token_bytes(recipe, self.target),
            tensor_parallel=recipe.target.tensor_parallel,
            trust_remote_code=recipe.target.trust_remote_code,
            seed=recipe.seed,
        )
        actor_class = engine_actor(
            engine_class,
            environment=engine_environment(self.accelerator, threads, batch_invariant=recipe.extraction.deterministic),
            num_cpus=recipe.resources.cpus_per_actor,
            num_gpus=recipe.target.tensor_parallel if self.accelerator == "gpu" else 0,
            name=f"{recipe.run_id}: {name}",
            concurrency=ENGINE_CONCURRENCY,
        )
        # The recipe's own engine arguments come last: they may override what is set here.
        return actor_class.remote(base | dict(args) | recipe.target.engine_args)

    def _all_cores(self) -> int:
        return os.cpu_count() or 1


def _problems(asked: Mapping[str, Any], timeout_s: float) -> dict[str, Exception]:
    """What went wrong with calls under way, by name: a RayError, or TimeoutError without an answer in time."""
    import ray

    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    problems: dict[str, Exception] = {}
    for name, answer in asked.items():
        try:
            ray.get(answer, timeout=0)
        except (ray.exceptions.RayError, TimeoutError) as problem:
            problems[name] = problem
    return problems


def remote_task(function: Callable[..., Any], recipe: Recipe, threads: int) -> Any:
    """A Ray task that may import torch, for work that the driver hands out whole."""
    import ray

    accelerated = recipe.resources.accelerator == "gpu"
    once = ray.remote(max_calls=1)(function)  # its process, full of torch, ends with it
    return once.options(
        num_cpus=recipe.resources.cpus_per_actor,
        num_gpus=1 if accelerated else 0,
        max_retries=0,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}},
    )
