"""The README's table of recipe fields is the schema's."""

from pathlib import Path

import pytest

from draftline.errors import InputError
from draftline.recipe.fields import recipe_fields
from draftline.recipe.schema import Recipe
from draftline.recipe.table import END, START, insert_table, recipe_table

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_holds_this_schema() -> None:
    text = README.read_text(encoding="utf-8")
    assert insert_table(text) == text, "run `python -m draftline.recipe.table README.md`"


def test_every_field_has_a_row_and_a_meaning() -> None:
    assert {field.name.split(".")[0] for field in recipe_fields()} == set(Recipe.model_fields)
    assert [field.name for field in recipe_fields() if not field.meaning] == []
    assert recipe_table().count("\n") == len(recipe_fields()) + 2


def test_rows_say_type_default_and_meaning() -> None:
    rows = recipe_table().splitlines()
    assert rows[0] == "| field | type | default | meaning |"
    assert "| `training.epochs` | whole number >= 1 | `1` | passes over the samples |" in rows
    assert any(row.startswith("| `data.prompts` | text | (needed) |") for row in rows)
    assert any(
        row.startswith("| `hidden_states.window_bytes` | bytes with a unit, such as 512MiB | `512MiB` |")
        for row in rows
    )
    assert any(row.startswith("| `draft.vocab_size` | whole number >= 1 or null | none |") for row in rows)


def test_the_table_replaces_what_stood_between_the_markers() -> None:
    old = f"before\n{START}\nold\n{END}\nafter\n"
    new = insert_table(old)
    assert new == f"before\n{START}\n{recipe_table()}{END}\nafter\n"
    assert insert_table(new) == new


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        insert_table("nothing")
    assert str(caught.value) == (
        "found no place for the recipe table; allowed: a text with the lines <!-- recipe-table:start --> and "
        "<!-- recipe-table:end -->"
    )
