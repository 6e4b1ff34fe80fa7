"""YAML text with a memory: the value, and where each key of it stands, so that a message can name the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftline.errors import InputError

KeyPath = tuple[str | int, ...]

# YAML 1.1 reads 1e-3 as text, because it wants a dot and a sign; every reader of a recipe means the number.
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, with 1e-3 a number and dates plain text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


class _BadNode(Exception):
    def __init__(self, node: yaml.Node, message: str) -> None:
        super().__init__(message)
        self.line = node.start_mark.line + 1


@dataclass(frozen=True)
class Source:
    """A value read from YAML and the line (from 1) of each key path in it. The empty path stands for the whole."""

    value: Any
    lines: Mapping[KeyPath, int]


def parse_yaml(text: str, *, label: str, numbered: bool = True) -> Source:
    """Parses one YAML document. `label` names the text in messages, followed by the line when `numbered`.

    Raises InputError for a text that is not YAML, repeats a key, or contains itself.
    """

    def refuse(line: int, problem: str) -> InputError:
        return InputError(f"{label}:{line}: {problem}" if numbered else f"{label}: {problem}")

    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise refuse(line, f"not YAML: found the character {error.character:#x}; allowed: printable text") from error
    try:
        node = loader.get_single_node()
        if node is None:
            return Source(None, {(): 1})
        lines = dict(_key_lines(node, (), ()))
        return Source(loader.construct_document(node), lines)
    except _BadNode as error:
        raise refuse(error.line, str(error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise refuse(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}") from error
    except (ValueError, RecursionError) as error:  # such as `!!int text`, or brackets nested beyond reason
        raise refuse(1, f"not YAML: {error}") from error
    finally:
        loader.dispose()


def read_text(path: Path) -> str:
    """The text of a file that the user named; raises InputError when it is missing, no file, or not UTF-8."""
    if not path.exists():
        raise InputError(f"{path}: no such file; allowed: the path of a recipe (YAML)")
    if not path.is_file():
        raise InputError(f"{path}: found a folder; allowed: the path of a recipe (YAML)")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: found the byte {content[error.start]:#04x}; allowed: UTF-8 text") from error


def _key_lines(node: yaml.Node, path: KeyPath, above: tuple[yaml.Node, ...]) -> Iterator[tuple[KeyPath, int]]:
    """Each key path below a node with its line. Raises _BadNode for a repeated key or a node that contains itself."""
    if any(node is parent for parent in above):
        raise _BadNode(node, f"{'.'.join(map(str, path))}: found an alias to what contains it; allowed: plain values")
    if not above:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            below = (*path, name)
            if name in seen and isinstance(key, yaml.ScalarNode):
                dotted = ".".join(map(str, below))
                raise _BadNode(key, f"{dotted}: found twice, first in line {seen[name]}; allowed: once")
            seen[name] = line
            yield below, line
            yield from _key_lines(value, below, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _key_lines(value, (*path, index), (*above, node))
