"""Pydantic's refusals in the user's words: one line a problem, with its place, what was found and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from draftline.recipe.fields import field_allows, field_meaning, section_keys, suggestion
from draftline.recipe.source import KeyPath

_LONGEST_VALUE = 80


@dataclass
class Places:
    """Where each value of a recipe came from: a line of the file, or an override."""

    file: str
    lines: Mapping[KeyPath, int]
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def override(self, path: KeyPath, label: str) -> None:
        """From now on the value at `path`, and all below it, came from this override."""
        self.overrides = {known: text for known, text in self.overrides.items() if known[: len(path)] != path}
        self.lines = {known: line for known, line in self.lines.items() if known[: len(path)] != path}
        self.overrides[path] = label

    def of(self, path: KeyPath) -> str:
        """`FILE:LINE` or `--set KEY=VALUE` of the value at `path`, or of the nearest key above it."""
        for depth in range(len(path), -1, -1):
            if (above := path[:depth]) in self.overrides:
                return self.overrides[above]
            if above in self.lines:
                return f"{self.file}:{self.lines[above]}"
        return f"{self.file}:1"


def describe_problems(error: ValidationError, values: Any, places: Places) -> list[str]:
    """One line per problem, in the order of the schema, without repeats."""
    return list(dict.fromkeys(_line(details, values, places) for details in error.errors(include_url=False)))


def _line(details: ErrorDetails, values: Any, places: Places) -> str:
    kind, location = details["type"], details["loc"]
    if kind in ("extra_forbidden", "invalid_key"):
        unknown = tuple(map(str, location))
        return f"{places.of(unknown)}: {'.'.join(unknown)}: unknown key; {suggestion(unknown)}"
    path = _schema_part(location)
    name = ".".join(path) or "recipe"
    allowed = field_allows()[path]
    if kind == "missing" and path == location:
        return f"{places.of(path)}: {name}: missing; allowed: {allowed} ({field_meaning(path)})"
    if kind == "value_error" and path in section_keys():
        message = details["msg"].removeprefix("Value error, ")
        named = _first_name(message, path)
        return f"{places.of(named)}: {'.'.join(named) or 'recipe'}: {message}"
    return f"{places.of(location)}: {name}: found {describe_value(_value_at(values, path))}; allowed: {allowed}"


def _schema_part(location: KeyPath) -> tuple[str, ...]:
    """The part of a pydantic location that names a field or section; what follows are list places and union members."""
    known = field_allows()
    depth = max(depth for depth in range(len(location) + 1) if location[:depth] in known)
    return tuple(map(str, location[:depth]))


def _first_name(message: str, section: tuple[str, ...]) -> tuple[str, ...]:
    """The field that a section's message begins with, such as `tap_layers must increase`; else the section."""
    named = (*section, *message.split(maxsplit=1)[0].split("."))
    return named if named in field_allows() else section


def _value_at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def describe_value(value: Any) -> str:
    """A value as its user wrote it, kept short: text in quotes, so that "2" and 2 differ."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
