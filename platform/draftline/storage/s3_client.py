"""The one place that makes boto3's clients. Endpoint, region and credentials come from boto3's own chain.

A custom endpoint is `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, or the `endpoint_url` of an AWS profile.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from draftline.errors import InputError

SMALLEST_PART_BYTES = 5 << 20
"""S3 takes no smaller part, but for the last."""

MOST_PARTS = 10_000

_HASTY_S = 10.0
_NO_URL = "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is no URL; allowed: e.g. https://s3.example.com:9000"


@dataclass(frozen=True, slots=True)
class S3Limits:
    """How an S3 store is used.

    `patience_s`: how long an operation goes on trying after its first failure. `timeout_s`: how long one request
    waits for an answer. `attempts`: how often botocore itself sends a request before that counts as a failure.
    `part_bytes`: files of this size or more are sent in parts of it. `transfers`: parts in flight at once.
    """

    patience_s: float = 120.0
    timeout_s: float = 60.0
    attempts: int = 4
    part_bytes: int = 32 << 20
    transfers: int = 8

    def __post_init__(self) -> None:
        if self.part_bytes < SMALLEST_PART_BYTES:
            raise ValueError(f"part_bytes: found {self.part_bytes}; allowed: {SMALLEST_PART_BYTES} or more")

    @property
    def connect_timeout_s(self) -> float:
        """How long a connection may take to come about: a store that is there takes it at once."""
        return min(10.0, self.timeout_s)

    def hasty(self) -> S3Limits:
        """The same for someone who waits for the message: soon out of patience."""
        return dataclasses.replace(
            self,
            patience_s=min(self.patience_s, _HASTY_S),
            timeout_s=min(self.timeout_s, _HASTY_S),
            attempts=min(self.attempts, 2),
        )

    def part_bytes_for(self, file_bytes: int) -> int:
        """The size of the parts that a file of that many bytes is sent in: no more than 10,000 of them."""
        return max(self.part_bytes, -(-file_bytes // MOST_PARTS))


def make_client(limits: S3Limits) -> Any:
    """A boto3 S3 client of its own session (making one is not thread-safe, using one is). Raises InputError."""
    import boto3
    from botocore import exceptions as boto
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": limits.attempts},
        connect_timeout=limits.connect_timeout_s,
        read_timeout=limits.timeout_s,
        max_pool_connections=2 * limits.transfers,
        tcp_keepalive=True,
        user_agent_extra="draftline",
    )
    try:
        client = boto3.session.Session().client("s3", config=config)
    except (boto.BotoCoreError, OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"store: {_wrong_setting(error)}") from error
    if any(mark in client.meta.endpoint_url for mark in "@?#"):  # a password with a slash moves the @ into the path
        raise InputError(
            "store: the S3 endpoint's URL has a user name or a password in it, or a query; allowed: scheme, host and "
            "port, with the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in an AWS profile"
        )
    try:
        place = urlsplit(client.meta.endpoint_url)
        usable = place.scheme in ("http", "https") and place.port != 0
    except ValueError:  # a port that is none
        usable = False
    if not usable:
        raise InputError(f"store: {_NO_URL}")
    return client


def _wrong_setting(error: Exception) -> str:
    """Which setting botocore refuses. Its own text is left out: it may repeat a line of a file with secrets."""
    from botocore import exceptions as boto

    if isinstance(error, boto.InvalidRegionError | boto.NoRegionError):
        return "AWS_REGION, AWS_DEFAULT_REGION or the AWS profile's region is no region; allowed: e.g. us-east-1"
    if isinstance(error, boto.ProfileNotFound):
        return "AWS_PROFILE names a profile that the AWS config files do not have; allowed: one that they have"
    if isinstance(error, boto.ConfigParseError):
        return "an AWS config file cannot be read (AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE); allowed: INI"
    if isinstance(error, boto.PartialCredentialsError):
        return (
            "found half of the credentials; allowed: both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if not isinstance(error, boto.BotoCoreError) and ("endpoint" in str(error) or "URL" in str(error)):
        return _NO_URL
    # Some settings botocore takes as they come, and stumbles over them later.
    return f"boto3 cannot use the AWS settings ({type(error).__name__}); check AWS_* and the AWS config file"


def make_transfers(client: Any, limits: S3Limits, part_bytes: int) -> Any:
    """s3transfer's manager, a context manager: many parts at once, whole or not at all."""
    from s3transfer.manager import TransferConfig, TransferManager

    config = TransferConfig(
        multipart_threshold=part_bytes,
        multipart_chunksize=part_bytes,
        max_request_concurrency=limits.transfers,
        max_submission_concurrency=2,
    )
    return TransferManager(client, config)
