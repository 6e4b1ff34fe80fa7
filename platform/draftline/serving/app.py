"""The Serve application: target and draft behind an OpenAI-compatible endpoint, built by `ray.serve.llm`.

`build` is what `serve run` and Serve config files name; `deploy` and `remove` are what a run calls. `ray.serve.llm`
imports vLLM, so `deploy` builds the application in a worker process and the caller stays light.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, LoggingConfig

from draftline.errors import InputError, RunFailed
from draftline.serving.config import ServeConfig, complete, engine_kwargs, parse_serve_config
from draftline.serving.port import hold_port
from draftline.serving.probe import ServeUnanswered, list_models, proxy_answers
from draftline.targets.engine_args import engine_environment

Progress = Callable[[str], None]
POLL_S = 0.5
REPORT_EVERY_S = 10.0
ANSWER_WITHIN_S = 30.0
MESSAGE_LINES = 14
# A machine whose cores are all busy decoding answers health checks late.
HEALTH_TIMEOUT_S = 60.0
_FAILED = "A replica failed to start"  # in the message of a deployment whose replica ended before it was up
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


class ServeFailed(RunFailed):
    """The application did not come up. Says the deployments' own messages."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running application: its name, and its endpoint without `/v1`."""

    name: str
    url: str


def build(args: Mapping[str, Any]) -> serve.Application:
    """Application builder for `serve run draftline.serving.app:build key=value ...` and for Serve config files."""
    return build_app(complete(parse_serve_config(args)))


def build_app(config: ServeConfig) -> serve.Application:
    """The application of a completed config. Imports vLLM."""
    from ray.serve.llm import LLMConfig, build_openai_app

    on_cpu = config.accelerator == "cpu"
    hardware: Any = {"kind": config.accelerator}
    llm = LLMConfig(
        model_loading_config={"model_id": config.model_name, "model_source": config.target},
        accelerator_config=hardware,
        # Logical CPUs only steer Ray's placement; the engine's threads are in its environment.
        placement_group_config={"bundle_per_worker": {"CPU": config.cpus}} if on_cpu else None,
        deployment_config={
            "num_replicas": config.replicas,
            "ray_actor_options": {"num_cpus": 0 if on_cpu else config.cpus},
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
        },
        runtime_env={"env_vars": engine_environment(config.accelerator, config.threads)},
        engine_kwargs=engine_kwargs(config),
    )
    ingress = {"num_replicas": config.replicas, "ray_actor_options": {"num_cpus": 0}}
    return build_openai_app({"llm_configs": [llm], "ingress_deployment_config": ingress})


def deploy(
    config: ServeConfig,
    *,
    timeout_s: float = 600.0,
    progress: Progress = lambda line: None,
    lost: Progress = lambda line: None,
) -> Served:
    """Starts the application (or replaces the one of the same name) and waits until it answers over HTTP.

    `lost` is told of each replica that failed to start; Ray Serve tries again by itself. Needs a connection to Ray.
    Raises InputError before anything starts when the port is taken or target and draft do not fit, ServeFailed when the
    application does not come up within `timeout_s`; what was started is removed then.
    """
    config = complete(config)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    config = _start_serve(config)
    replaces = config.application in serve.status().applications
    try:
        _wait_until_running(config, timeout_s, progress, lost)
    except BaseException:
        if not replaces:
            remove(config.application)
        raise
    _end_telemetry()
    return Served(config.application, config.url)


def unhealthy(name: str) -> str | None:
    """What is wrong with a running application, in words; None: all its replicas are healthy."""
    application = serve.status().applications.get(name)
    if application is None:
        return f"the application {name} is gone"
    ill = [
        f"{deployment} is {info.status}: {info.message or 'no message'}"
        for deployment, info in application.deployments.items()
        if info.status != "HEALTHY"
    ]
    return "; ".join(ill) or None


def remove(name: str) -> None:
    """Ends the application, and Serve itself when it was the last one. Nothing happens when there is none."""
    applications = serve.status().applications
    if name in applications:
        serve.delete(name)
    if not applications.keys() - {name}:
        serve.shutdown()
        _end_telemetry()


def _start_serve(config: ServeConfig) -> ServeConfig:
    """Starts Serve's proxy on the config's port, or makes sure that the Serve that runs already listens there."""
    if serve.status().proxies:
        if config.port == 0:
            raise InputError(
                "serving.port: 0 means any free port, but Ray Serve runs already; name the port it listens on"
            )
        if not proxy_answers(config.model_copy(update={"route_prefix": "/"}).url):
            raise InputError(
                f"serving.port: Ray Serve runs on this cluster already, and not on port {config.port}; one cluster "
                "serves on one port: name that, or shut Serve down first"
            )
        return config
    with hold_port(config.host, config.port) as port:
        config = config.model_copy(update={"port": port})
    serve.start(http_options=HTTPOptions(host=config.host, port=config.port), logging_config=QUIET)
    return config


def _submit(config: ServeConfig) -> ray.ObjectRef:
    """Builds and deploys the application in a worker process of its own, which ends afterwards."""

    def build_and_deploy(values: dict[str, Any]) -> None:
        app = build_app(ServeConfig(**values))
        target = serve.RunTarget(
            app, name=config.application, route_prefix=config.route_prefix, logging_config=QUIET.model_dump()
        )
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    environment = engine_environment(config.accelerator, config.threads)
    # One call a process: vLLM's memory goes back when the application is built.
    task = ray.remote(num_cpus=0, max_calls=1, max_retries=0, runtime_env={"env_vars": environment})(build_and_deploy)
    return task.remote(config.model_dump())


def _wait_until_running(config: ServeConfig, timeout_s: float, progress: Progress, lost: Progress) -> None:
    began = time.monotonic()
    submitted = _submit(config)
    reported = began
    told: set[str] = set()
    while True:
        built, _ = ray.wait([submitted], timeout=POLL_S)
        if built:
            ray.get(submitted)
            application = serve.status().applications.get(config.application)
            if application is not None and application.status == ApplicationStatus.RUNNING:
                break
            if application is not None and application.status == ApplicationStatus.DEPLOY_FAILED:
                raise ServeFailed(_say(config.model_name, application))
            for loss in losses(application) - told:
                told.add(loss)
                lost(loss)
            time.sleep(POLL_S)
        now = time.monotonic()
        if now - began > timeout_s:
            raise ServeFailed(f"{config.model_name} is not up after {timeout_s:g} s: {_waits_for(config, bool(built))}")
        if now - reported >= REPORT_EVERY_S:
            reported = now
            progress(f"{_waits_for(config, bool(built))}, {now - began:.0f} s")
    _wait_for_answer(config)


def _wait_for_answer(config: ServeConfig) -> None:
    """A running application answers once its route has reached the proxy."""
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while True:
        try:
            models = list_models(config.url)
        except ServeUnanswered as error:
            if time.monotonic() > deadline:
                raise ServeFailed(f"{config.model_name} runs, but its endpoint does not answer: {error}") from error
            time.sleep(POLL_S)
            continue
        if config.model_name not in models:
            raise ServeFailed(
                f"{config.url} answers for {', '.join(models) or 'no model'}, not for {config.model_name}"
            )
        return


def _waits_for(config: ServeConfig, built: bool) -> str:
    if not built:
        return "building the Serve application"
    application = serve.status().applications.get(config.application)
    if application is None:
        return "waiting for Serve to take the application"
    waiting = [name for name, deployment in application.deployments.items() if deployment.status != "HEALTHY"]
    return f"waiting for {' and '.join(waiting) or 'Serve'} to start"


def losses(application: Any) -> set[str]:
    """What a starting application's deployments say of replicas that failed: Serve counts the tries in the text."""
    deployments = application.deployments.items() if application is not None else ()
    return {
        f"{name}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"
        for name, deployment in deployments
        if (lines := deployment.message.strip().splitlines()) and _FAILED in deployment.message
    }


def _say(name: str, application: Any) -> str:
    messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
    lines = "\n".join(message for message in messages if message).splitlines()
    if len(lines) > MESSAGE_LINES:  # a traceback: what failed stands first, why it failed last
        lines = [*lines[:2], "...", *lines[2 - MESSAGE_LINES :]]
    return f"{name} failed to start: " + "\n".join(lines)


def _end_telemetry() -> None:
    """Ends the detached actor in which ray.serve.llm counts models: it holds 400 MB and outlives the application."""
    try:
        ray.kill(ray.get_actor("llm_serve_telemetry", namespace="llm_serve_telemetry"))
    except ValueError:
        return
