"""Samples on disk: what the target answered, as token ids, in one Parquet file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftline.storage.files import atomic_path

_SCHEMA = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("held_out", pa.bool_(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ],
    metadata={"draftline": "samples 1"},
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised conversation turn.

    `token_ids` is prompt and answer exactly as the engine saw them, `prompt_tokens` the length of the prompt;
    `number` is unique in a run and `finish_reason` the engine's ("stop" or "length").
    """

    number: int
    domain: str
    held_out: bool
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target wrote."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True at the positions whose hidden state predicts one of the target's own tokens; as long as `token_ids`."""
        length = len(self.token_ids)
        return tuple(self.prompt_tokens - 1 <= position < length - 1 for position in range(length))


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Writes the samples in the given order; the file is whole or absent. Token ids must be below 2**31."""
    rows = [{name: getattr(sample, name) for name in _SCHEMA.names} for sample in samples]
    with atomic_path(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary, compression="zstd")


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file in their order. Raises ValueError for a file that holds something else."""
    table = pq.read_table(path)
    if not table.schema.equals(_SCHEMA) or table.schema.metadata != _SCHEMA.metadata:
        raise ValueError(f"{path} does not hold samples in this version's form: {table.schema.remove_metadata()}")
    columns = [table.column(name).to_pylist() for name in _SCHEMA.names]
    return [
        Sample(number, domain, held_out, tuple(token_ids), prompt_tokens, finish_reason)
        for number, domain, held_out, token_ids, prompt_tokens, finish_reason in zip(*columns, strict=True)
    ]
