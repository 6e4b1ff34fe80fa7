"""The small files of a target's folder, as their user left them: a damaged one is named in an InputError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftline.errors import InputError


def read_json(file: Path, label: str = "") -> dict[str, Any]:
    """The JSON object in a file. `label` begins the message of the InputError raised when it holds none."""
    before = f"{label}: " if label else ""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{before}{file} is not JSON: {error}") from error
    except OSError as error:
        raise InputError(f"{before}{file} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise InputError(f"{before}{file} holds no JSON object")
    return value


def chat_template(folder: Path, label: str = "") -> str | None:
    """The text of the folder's chat templates, all of them; none when it has none. Raises InputError."""
    before = f"{label}: " if label else ""
    templates = []
    for file in sorted(folder.glob("**/*.jinja")):
        try:
            templates.append(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError) as error:
            raise InputError(f"{before}{file} cannot be read as UTF-8 text: {error}") from error
    settings = folder / "tokenizer_config.json"
    named = read_json(settings, label).get("chat_template") if settings.is_file() else None
    if isinstance(named, str):
        named = [{"template": named}]
    if not isinstance(named, list | None) or not all(isinstance(entry, dict) for entry in named or ()):
        raise InputError(
            f"{before}{settings}: chat_template: found {named!r:.80}; allowed: text, or a list of templates"
        )
    return "\n".join([*templates, *(str(entry.get("template")) for entry in named or ())]) or None
