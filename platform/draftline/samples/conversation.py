"""One conversation in any of the forms that prompt files use, brought to the form that chat templates take."""

from __future__ import annotations

from typing import Any

Message = dict[str, str]

PROMPT_FIELDS = ("prompt", "question", "turns", "messages", "conversations")
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


class BadPrompt(Exception):
    """What is wrong with a prompt; the message continues the field's name, such as `[1].role: found ...`."""


def conversation_of(value: Any) -> tuple[Message, ...]:
    """The messages of a prompt, the last one a user's.

    A text is one user message. A list of texts holds a user's turns, of which only the first is taken: the later ones
    were written for answers that this target did not give. A list of messages (`role` or `from`, `content` or `value`)
    may begin with a system message and alternates from user to assistant; an assistant's message at its end is
    dropped, because the target answers itself. Raises BadPrompt.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": plain_text("", value)},)
    if not isinstance(value, list) or not value:
        raise BadPrompt(f": found {_shown(value)}; allowed: text, or a list of turns or messages that is not empty")
    if isinstance(value[0], str):
        return ({"role": "user", "content": plain_text("[0]", value[0])},)
    messages = [_message(f"[{place}]", entry) for place, entry in enumerate(value)]
    _check_order(messages)
    return tuple(messages[:-1] if messages[-1]["role"] == "assistant" else messages)


def _message(place: str, entry: Any) -> Message:
    if not isinstance(entry, dict):
        raise BadPrompt(f"{place}: found {_shown(entry)}; allowed: a message with `role` and `content`")
    role_key = "from" if "from" in entry and "role" not in entry else "role"
    text_key = "value" if "value" in entry and "content" not in entry else "content"
    for key in (role_key, text_key):
        if key not in entry:
            raise BadPrompt(f"{place}: found the fields {', '.join(entry) or 'none'}; allowed: `role` and `content`")
    role = entry[role_key]
    if not isinstance(role, str) or role not in _ROLES:
        raise BadPrompt(f"{place}.{role_key}: found {_shown(role)}; allowed: {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": plain_text(f"{place}.{text_key}", entry[text_key])}


def _check_order(messages: list[Message]) -> None:
    offset = int(messages[0]["role"] == "system")
    if len(messages) == offset:
        raise BadPrompt(f"[{offset}]: found no message after the system message; allowed: a user message")
    for place, message in enumerate(messages[offset:], start=offset):
        expected = ("user", "assistant")[(place - offset) % 2]
        if message["role"] != expected:
            raise BadPrompt(f"[{place}].role: found {message['role']}; allowed here: {expected}")


def plain_text(place: str, value: Any) -> str:
    """`value`, when it is text with something in it. Raises BadPrompt, beginning with `place`."""
    if not isinstance(value, str) or not value.strip():
        raise BadPrompt(f"{place}: found {_shown(value)}; allowed: text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadPrompt(f"{place}: found half of a surrogate pair; allowed: Unicode text") from error
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
