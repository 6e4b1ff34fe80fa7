"""What training and export both make of the samples: the draft's vocabulary, its provenance, the batch plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from draftline.drafts.manifest import Provenance
from draftline.runs.context import RunContext
from draftline.samples.plan import BatchPlan, plan_rows
from draftline.samples.rows import Sample
from draftline.storage.files import sha256_file
from draftline.targets.tokens import read_vocabulary
from draftline.training.vocabulary import choose_vocabulary


def batch_plan(context: RunContext, samples: Sequence[Sample]) -> BatchPlan:
    """Which samples make up which row, of training and of held-out evaluation."""
    training = context.recipe.training
    return plan_rows(
        {sample.number: len(sample.token_ids) for sample in samples},
        [sample.number for sample in samples if sample.held_out],
        row_tokens=training.row_tokens,
        ranks=training.workers,
        epochs=training.epochs,
        seed=context.recipe.seed,
    )


def draft_vocabulary(context: RunContext, samples: Sequence[Sample]) -> tuple[int, ...] | None:
    """Target token ids that the draft can say, from the training answers' own counts; None: all of them."""
    size = context.recipe.draft.vocab_size
    if size is None:
        return None
    counts = Counter(
        token for sample in samples if not sample.held_out for token in sample.token_ids[sample.prompt_tokens :]
    )
    # The tokens that end an answer must be draftable however rare they are in short data.
    always = read_vocabulary(context.target.path).in_use
    return tuple(choose_vocabulary(counts, context.target.vocab_size, size, always))


def provenance(context: RunContext) -> Provenance:
    """What the draft is made of, for its manifest."""
    record = context.frame.record
    return Provenance(
        target=context.target.name,
        recipe_sha256=record.recipe_sha256,
        data_sha256=sha256_file(context.samples_file),
        versions=record.versions,
    )
