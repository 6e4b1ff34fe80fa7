"""export: the trained draft becomes a folder in speculators' format, checked against the model that was trained."""

from __future__ import annotations

from draftline.drafts.task import ExportSpec, run_export
from draftline.runs.actors import remote_task
from draftline.runs.context import RunContext
from draftline.runs.frame import Stage
from draftline.runs.material import draft_vocabulary, provenance
from draftline.samples.rows import read_samples

CHECKED_SAMPLES = 2


def export(context: RunContext, stage: Stage) -> None:
    """Leaves the draft in the run's folder."""
    import ray

    samples = read_samples(context.samples_file)
    chosen = [sample for sample in samples if sample.held_out][:CHECKED_SAMPLES]
    replica = context.actors.replicas()[0]
    manifests = ray.get(
        [replica.capture.remote(context.key("export", sample.number), sample.token_ids) for sample in chosen]
    )
    folder, figures = context.frame.folder, context.frame.record.figures
    spec = ExportSpec(
        recipe=context.recipe,
        target=str(context.target.path),
        kept_tokens=draft_vocabulary(context, samples),
        mask_token_id=context.mask_token_id,
        checkpoints=str(folder.checkpoints.resolve()),
        draft=str(folder.draft.resolve()),
        provenance=provenance(context),
        metrics={name: float(value) for name, value in figures.items() if name.startswith("train.")},
        samples=[(manifest, sample.prompt_tokens) for manifest, sample in zip(manifests, chosen, strict=True)],
        store=context.actors.store(),
        workspace=context.frame.workspace,
    )
    report = ray.get(remote_task(run_export, context.recipe, threads=1).remote(spec))
    stage.made_in_store(context.frame.workspace.name(folder.draft))
    context.frame.figures({f"export.{name}": value for name, value in report.items()})
    context.frame.progress.say(
        f"exported to {folder.draft}; {report['drafted_tokens']} drafted tokens equal the trained model's"
    )
