"""YAML text with a memory: the value, and where each key of it stands, so that a message can name the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftline.errors import InputError
from draftline.storage.files import open_user_file

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
# Numbers as every reader means them. YAML 1.1 reads 1e-3 as text, because it wants a dot and a sign, 010 as 8 and 1:30
# as 90: here the first is a number, and the others are text, which a field of numbers refuses.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
)
_OWN = {_TAG + kind for kind in ("int", "float", "timestamp")}
_KINDS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
_MERGE = _TAG + "merge"
# Aliases of aliases make a few lines stand for more values than memory holds.
_MOST_VALUES = 50_000


class _Loader(yaml.SafeLoader):
    """The part of YAML's safe subset that JSON has too, with dates as plain text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """See yaml; a scalar that is not what its tag says, or no Unicode text, is a bad node."""
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= character < "\ue000" for character in node.value):
            raise _BadNode(node, "found half of a surrogate pair; allowed: Unicode text")
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError) as error:  # such as `!!int text`, or more digits than Python takes
            value = str(node.value)
            shown = value if len(value) <= 80 else f"{value[:77]}..."
            raise _BadNode(node, f"not YAML: {shown} cannot be read as {node.tag.removeprefix(_TAG)}") from error


_Loader.yaml_constructors = {
    tag: constructor for tag, constructor in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _KINDS
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OWN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that any reader, or this one, would take for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


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
        lines = {}
        for path, line in _key_lines(node, (), ()):
            lines[path] = line
            if len(lines) > _MOST_VALUES:
                raise _BadNode(node, f"found more than {_MOST_VALUES} values, aliases counted; allowed: fewer")
        return Source(loader.construct_document(node), lines)
    except _BadNode as error:
        raise refuse(error.line, str(error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise refuse(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise refuse(1, "not YAML: found brackets nested beyond reason; allowed: plain values") from error
    finally:
        loader.dispose()


def dump_yaml(value: Any) -> str:
    """A value of mappings, lists and scalars as YAML, which `parse_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_text(path: Path) -> str:
    """The text of a file that the user named; raises InputError when it is missing, no file, or not UTF-8."""
    with open_user_file(path, "the path of a recipe (YAML)") as file:
        content = file.read()
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
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _TAG + "str"  # keys are text, as in JSON: `yes` and `1` too
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
