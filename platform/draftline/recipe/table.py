"""The recipe's fields as a markdown table: `python -m draftline.recipe.table [README.md]` prints or inserts it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from draftline.errors import InputError
from draftline.recipe.fields import RecipeField, recipe_fields
from draftline.recipe.problems import describe_value
from draftline.storage.files import write_text_atomic

START, END = "<!-- recipe-table:start -->", "<!-- recipe-table:end -->"
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def recipe_table() -> str:
    """All fields of the schema, one row each, ending with a newline."""
    rows = [("field", "type", "default", "meaning"), ("---",) * 4]
    rows += [(f"`{field.name}`", field.allowed, _default(field), field.meaning) for field in recipe_fields()]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def insert_table(text: str) -> str:
    """`text` with everything between the two markers replaced by the table. Raises InputError without the markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InputError(f"found no place for the recipe table; allowed: a text with the lines {START} and {END}")
    return f"{before}{START}\n{recipe_table()}{END}{after}"


def _default(field: RecipeField) -> str:
    if field.required:
        return "(needed)"
    if field.default is None:
        return "none"
    return f"`{_with_unit(field.default) if field.allowed.startswith('bytes') else _plain(field.default)}`"


def _with_unit(count: int) -> str:
    unit, size = next((unit for unit in _UNITS if count % unit[1] == 0), ("B", 1))
    return f"{count // size}{unit}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else describe_value(value)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m draftline.recipe.table", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="file whose table is brought up to date; none: print it")
    file: Path | None = parser.parse_args().file
    if file is None:
        print(recipe_table(), end="")
    else:
        write_text_atomic(file, insert_table(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
