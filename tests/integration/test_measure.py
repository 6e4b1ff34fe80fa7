"""Measuring with real engines: the tiny target with and without an untrained draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from draftline.evaluation.answers import HeldOutPrompt
from draftline.evaluation.engine import DRAFT_ENGINE_ARGS, PLAIN_ENGINE_ARGS, MeasuredEngine
from draftline.evaluation.figures import evaluation_figures
from draftline.evaluation.measure import measure
from draftline.evaluation.served_check import check_served
from draftline.targets.engine import engine_actor
from draftline.targets.engine_args import base_engine_args, draft_engine_args, engine_environment
from tiny import build_tiny_draft

BLOCK = 4
MAX_TOKENS = 32


def _start(name: str, args: dict[str, Any]) -> Any:
    environment = engine_environment("cpu", threads=1)
    actor = engine_actor(
        MeasuredEngine, environment=environment, num_cpus=0.5, num_gpus=0, name=name, concurrency=16
    ).remote(args)
    ray.get(actor.start.remote(), timeout=240)
    return actor


@pytest.mark.timeout(300)
def test_answers_are_identical_and_drafts_are_counted(tiny_target: Path, tmp_path: Path) -> None:
    draft = build_tiny_draft(tiny_target, tmp_path / "draft", block_size=BLOCK)
    base = base_engine_args(tiny_target, accelerator="cpu", dtype="auto", max_model_len=128, max_requests=4)
    drafting = draft_engine_args(draft, draft_tokens=BLOCK, accelerator="cpu", confidence_cut=0.9)
    prompts = [HeldOutPrompt(n, "even" if n % 2 == 0 else "odd", (40 + n, 50, 60 + n, 70)) for n in range(6)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    lines: list[str] = []
    try:
        plain = _start("plain", base | PLAIN_ENGINE_ARGS)
        drafted = _start("drafted", base | drafting | DRAFT_ENGINE_ARGS)
        measurements = measure(
            plain, drafted, prompts, max_tokens=MAX_TOKENS, serving_cut=0.9, timeout_s=60, progress=lines.append
        )
        ray.get([plain.stop.remote(), drafted.stop.remote()], timeout=60)
    finally:
        ray.shutdown()

    assert [m.number for m in measurements] == [p.number for p in prompts]
    assert len(lines) == len(prompts) + 1
    for m in measurements:
        assert m.plain.token_ids == m.served.token_ids
        assert 0 < len(m.plain.token_ids) <= MAX_TOKENS and m.plain.drafted == ()
        # Uncut drafts are whole blocks; cut ones end earlier, and nothing is accepted that was not drafted.
        assert set(m.uncut.drafted) <= {BLOCK}
        assert all(0 <= kept <= length for kept, length in zip(m.served.accepted, m.served.drafted, strict=True))
        if len(m.uncut.token_ids) > 1:
            # The first token comes from the prompt; every other from a verified draft. The last may reach too far.
            yielded = 1 + sum(kept + 1 for kept in m.uncut.accepted)
            assert 0 <= yielded - len(m.uncut.token_ids) <= BLOCK
    cut = [length for m in measurements for length in m.served.drafted]
    assert not cut or sum(cut) / len(cut) < BLOCK
    figures = evaluation_figures(measurements, estimate=1.0)
    check_served(figures | {"evaluate.estimate_gap": 0.0}, measurements, tolerance=0.02)
    assert figures["evaluate.identical_share"] == 1.0
    assert {"evaluate.acceptance.even", "evaluate.acceptance.odd"} <= figures.keys()
