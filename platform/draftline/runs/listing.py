"""A run's record and a store's runs as text for people."""

from __future__ import annotations

from draftline.errors import InputError
from draftline.runs.policy import count_by_cause
from draftline.runs.progress import duration, time_table
from draftline.runs.record import Figure, RunRecord, read_record, run_ids
from draftline.storage.store import ArtifactStore, NotFound


def report_text(record: RunRecord) -> str:
    """State, stages and figures of one run."""
    lines = [f"run {record.run_id}: {record.state}", ""]
    for name, stage in record.stages.items():
        attempts = len(stage.attempts)
        reason = stage.attempts[-1].reason if attempts and stage.attempts[-1].reason else ""
        tries = f"{attempts} attempts" if attempts > 1 else ""
        lines.append(f"  {name:<10}{stage.state:<10}{tries:<14}{reason}".rstrip())
    if record.events_by_cause:
        lines += ["", f"  recovered from  {count_by_cause(record.events_by_cause)}; record.json says each"]
    if record.guarantee:
        lines += ["", f"  weights  {record.guarantee}"]
    figures = {name: value for name, value in sorted(record.figures.items()) if not name.startswith("time.")}
    if figures:
        width = max(map(len, figures))
        lines += ["", *(f"  {name:<{width}}  {_shown(name, value)}" for name, value in figures.items())]
    if "time.total_s" in record.figures:
        lines += ["", time_table(record.figures, len(record.attempts))]
    return "\n".join(lines)


def runs_text(store: ArtifactStore) -> str:
    """One line for each run of the store: its name, state, time and when it began."""
    if store.folder is not None and not store.folder.is_dir():
        raise InputError(f"there is no store {store.url}; name it with --store")
    rows = [_run_row(store, run_id) for run_id in run_ids(store)]
    if not rows:
        return f"no runs in {store.url}"
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}  {state:<8}  {took:>7}  {began}".rstrip() for name, state, took, began in rows)


def _run_row(store: ArtifactStore, run_id: str) -> tuple[str, str, str, str]:
    try:
        record = read_record(store, run_id).record
    except (InputError, NotFound):
        return run_id, "unknown", "", "its record cannot be read"
    took = duration(float(record.figures.get("time.total_s", 0)))
    began = record.attempts[0].started[:19].replace("T", " ") if record.attempts else ""
    return record.run_id, str(record.state), took, began


def _shown(name: str, value: Figure) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / (1 << 30):.2f} GiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
