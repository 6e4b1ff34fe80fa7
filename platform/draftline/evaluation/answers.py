"""What evaluation asks and what comes back: prompts, answers, measurements. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer.

    `drafted[i]` tokens were proposed in the i-th verification and `accepted[i]` of them kept; both are empty without a
    draft. The last draft may reach beyond the answer's end. `seconds` runs from asking to the last token.
    """

    token_ids: tuple[int, ...]
    seconds: float
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt that the draft never saw, as the target's token ids."""

    number: int
    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The answers to one prompt: by the target alone, with the draft as it will be served, and with uncut drafts."""

    number: int
    domain: str
    plain: Answer
    served: Answer
    uncut: Answer
