"""How many bytes hidden states take in the store. Pure arithmetic, exact to the byte."""

from __future__ import annotations

from dataclasses import dataclass

# Above this share of the mounted segments Mooncake begins to refuse or evict (measured).
STORE_FILL = 0.8
# hs-connectors packs tensors at multiples of this; token ids travel along as int64.
_ALIGNMENT_BYTES = 64
_TOKEN_ID_BYTES = 8
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class StatesShape:
    """Hidden states of one token: `layers` x `hidden_size` numbers of `item_bytes` bytes.

    `layers` counts the tap layers and the target's last layer.
    """

    layers: int
    hidden_size: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden states."""
        return self.layers * self.hidden_size * self.item_bytes

    def sample_bytes(self, tokens: int) -> int:
        """Bytes of one stored sample of so many tokens: states [T, layers, H], token ids [T] and checksum, packed."""
        states, token_ids = tokens * self.token_bytes, tokens * _TOKEN_ID_BYTES
        return _aligned(states) + _aligned(token_ids) + _aligned(_CHECKSUM_BYTES)


def store_capacity(segment_bytes: int, segments: int) -> int:
    """Bytes that may lie in so many segments at once."""
    return int(STORE_FILL * segment_bytes * segments)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
