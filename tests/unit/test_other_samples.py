"""Samples that were made again: what was learned from those before goes, unless they are the same."""

from pathlib import Path

import pytest

from draftline.recipe.schema import Recipe
from draftline.runs.frame import RunFrame
from draftline.runs.progress import Progress
from draftline.runs.stages.prepare import forget_trainings_on_others
from draftline.storage.local import LocalStore

RECIPE = Recipe.model_validate(
    {
        "run_id": "first",
        "target": {"path": "target"},
        "data": {"prompts": "prompts.jsonl"},
        "draft": {"tap_layers": [0, 1]},
    }
)


@pytest.mark.parametrize(
    ("before", "kept"),
    [({}, True), ({"samples/s": "a"}, True), ({"samples/s": "b"}, False)],
    ids=["none", "same", "other"],
)
def test_checkpoints_and_skip_list_stay_only_with_their_samples(
    tmp_path: Path, before: dict[str, str], kept: bool
) -> None:
    with RunFrame.open(LocalStore(tmp_path), RECIPE, Progress()) as frame:
        published = frame.folder.checkpoints / "step-00000002" / "manifest.json"
        unfinished = frame.folder.checkpoints / ".writing-4" / "weights"
        for file in (published, unfinished, frame.folder.skip_list):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")
        frame.record.stages["prepare"].outputs = before
        forget_trainings_on_others(frame, {"samples/s": "a"})
        assert [file.exists() for file in (published, unfinished, frame.folder.skip_list)] == [kept] * 3
        assert (frame.folder.path / "record.json").exists()
