"""The schema seen as a flat list of dotted fields: names, and what each allows, in words.

Messages about bad input and the README's table both read the schema here, so they say the same.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftline.recipe.schema import Recipe, Section

MAPPING = "a mapping of keys"
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class RecipeField:
    """One leaf of the schema. `default` is None both for "no default" (then `required`) and for a default of null."""

    name: str
    allowed: str
    required: bool
    default: Any
    meaning: str


@cache
def recipe_fields() -> tuple[RecipeField, ...]:
    """All fields of a recipe in the schema's order, named by their dotted path."""
    return tuple(_walk(Recipe, ()))


@cache
def field_allows() -> dict[tuple[str, ...], str]:
    """What each field or section allows, by path; the recipe itself is the empty path."""
    sections = {path: MAPPING for path, _ in _sections(Recipe, ())}
    return sections | {tuple(field.name.split(".")): field.allowed for field in recipe_fields()}


@cache
def section_keys() -> dict[tuple[str, ...], tuple[str, ...]]:
    """The keys of each section, by the section's path; the recipe itself is the empty path."""
    return {path: tuple(model.model_fields) for path, model in _sections(Recipe, ())}


def field_meaning(path: tuple[str, ...]) -> str:
    """What a field or section is for."""
    return _meanings()[path]


def suggestion(path: Sequence[str]) -> str:
    """What an unknown key may have meant: the nearest key beside it, or of that name elsewhere, or all allowed ones."""
    *parents, key = path
    siblings = section_keys().get(tuple(parents), ())
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean `{'.'.join([*parents, near[0]])}`?"
    elsewhere = {known[-1]: ".".join(known) for known in reversed(field_allows()) if known}
    if near := difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.8):
        return f"did you mean `{elsewhere[near[0]]}`?"
    return f"allowed: {', '.join(siblings)}"


@cache
def _meanings() -> dict[tuple[str, ...], str]:
    sections = {path: (model.__doc__ or "").strip().rstrip(".") for path, model in _sections(Recipe, ())}
    return sections | {tuple(field.name.split(".")): field.meaning for field in recipe_fields()}


def _sections(model: type[Section], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    yield path, model
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            yield from _sections(field.annotation, (*path, name))  # type: ignore[arg-type]


def _walk(model: type[Section], path: tuple[str, ...]) -> Iterator[RecipeField]:
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            yield from _walk(field.annotation, (*path, name))  # type: ignore[arg-type]
            continue
        yield RecipeField(
            name=".".join((*path, name)),
            allowed=_in_words(field.annotation, field.metadata),
            required=field.is_required(),
            default=None if field.is_required() else _default(field),
            meaning=field.description or "",
        )


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return None if value is PydanticUndefined else value


def _in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type with its bounds, for a reader who does not know Python: "whole number >= 1"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(args[0], [*metadata, *args[1:]])
    metadata = [part for entry in metadata for part in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(arg) for arg in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin is list:
        at_least = next((entry.min_length for entry in metadata if hasattr(entry, "min_length")), 0)
        return f"list{f' of at least {at_least}' if at_least else ''}: {_in_words(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(dict.fromkeys(_in_words(arg) for arg in args))}"
    if origin is dict:
        return MAPPING
    if any(isinstance(entry, BeforeValidator) for entry in metadata):
        return "bytes with a unit, such as 512MiB"
    words = _PLAIN.get(annotation, "any value")
    patterns = [f"of the form {entry.pattern}" for entry in metadata if getattr(entry, "pattern", None)]
    return " ".join(filter(None, [words, " and ".join(_bounds(metadata)), *patterns]))


def _bounds(metadata: Sequence[Any]) -> list[str]:
    return [
        f"{sign} {value if isinstance(value, int) else f'{value:g}'}"
        for entry in metadata
        for name, sign in _BOUNDS
        if (value := getattr(entry, name, None)) is not None
    ]
