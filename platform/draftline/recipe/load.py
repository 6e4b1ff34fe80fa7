"""From a YAML file and `--set` overrides to a checked recipe, and back to text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftline.errors import InputError
from draftline.recipe.fields import MAPPING, field_allows, section_keys, suggestion
from draftline.recipe.problems import Places, describe_problems, describe_value
from draftline.recipe.schema import Recipe
from draftline.recipe.source import dump_yaml, parse_yaml, read_text

_ABSENT = "absent"
_WANTED = "a mapping of keys, such as run_id, target, data and draft"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file with overrides such as `training.epochs=2` applied in order.

    Raises InputError with one line per problem: `FILE:LINE: key: what was found; what is allowed`, and
    `--set KEY=VALUE` in place of FILE:LINE where an override is at fault.
    """
    source = parse_yaml(read_text(path), label=str(path))
    if source.value is None:
        raise InputError(f"{path}:1: found an empty file; allowed: {_WANTED}")
    if not isinstance(source.value, dict):
        raise InputError(f"{path}:1: found {describe_value(source.value)}; allowed: {_WANTED}")
    places = Places(str(path), source.lines)
    values = source.value
    for override in overrides:
        values = _apply(override, values, places)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError("\n".join(describe_problems(error, values, places))) from error


def _apply(override: str, values: dict[str, Any], places: Places) -> dict[str, Any]:
    """A copy of `values` with one override in it; `places` learns where the new values came from."""
    label = f"--set {override}"
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise InputError(f"{label}: found no KEY=VALUE; allowed: a dotted key and a value, such as training.epochs=2")
    _require_known(label, path)
    value = parse_yaml(text, label=label, numbered=False).value
    result = dict(values)
    section = result
    for depth, key in enumerate(path[:-1], start=1):
        below = section.get(key, {})
        if not isinstance(below, dict):
            raise InputError(f"{label}: {'.'.join(path[:depth])}: found {describe_value(below)}; allowed: {MAPPING}")
        section[key] = section = dict(below)
    section[path[-1]] = value
    places.override(path, label)
    return result


def _require_known(label: str, path: tuple[str, ...]) -> None:
    """Raises InputError unless the schema has this path. What stands inside a free mapping (engine_args) is free."""
    for depth in range(1, len(path) + 1):
        known = path[:depth]
        if known not in field_allows():
            raise InputError(f"{label}: {'.'.join(known)}: unknown key; {suggestion(known)}")
        if known not in section_keys():
            if depth < len(path) and field_allows()[known] != MAPPING:
                raise InputError(f"{label}: {'.'.join(path)}: unknown key; {'.'.join(known)} has no keys of its own")
            return


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every field written out; `load_recipe` reads it back to an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def recipe_sha256(recipe: Recipe) -> str:
    """Hash of the resolved recipe: equal for equal recipes, however they were written."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two dumped recipes, one line a field: `training.epochs: 2 -> 3`. Empty when equal."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    return [
        f"{name}: {_shown(before, name)} -> {_shown(after, name)}"
        for name in dict.fromkeys([*before, *after])
        if name not in before or name not in after or before[name] != after[name]
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _shown(leaves: Mapping[str, Any], name: str) -> str:
    return json.dumps(leaves[name], ensure_ascii=False) if name in leaves else _ABSENT
