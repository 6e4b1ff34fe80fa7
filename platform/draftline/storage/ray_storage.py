"""The artifact store as Ray Train takes it. Imports no Ray."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from draftline.storage.keys import join
from draftline.storage.store import ArtifactStore, StoreFailed

_ATTEMPTS = 8  # with the pauses of the AWS SDK between them: about as patient as the store's own 120 s


def ray_storage(store: ArtifactStore, prefix: str) -> tuple[str, Any]:
    """`storage_path` and `storage_filesystem` (a pyarrow FileSystem, or None) of a RunConfig for a place in the store.

    On S3, the endpoint and the region are those that the store's own client uses. Credentials are not handed on: each
    machine finds them by itself, where boto3 does too (environment, profile, role). Raises StoreFailed, InputError.
    """
    prefix = prefix.strip("/")
    if store.folder is not None:
        return str(store.folder / prefix), None
    from draftline.storage.s3 import S3Store

    if not isinstance(store, S3Store):
        raise StoreFailed(f"{store.url}: Ray Train cannot write to a store of that kind")
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    place, meta, limits = store.place, store.client().meta, store.limits
    options: dict[str, Any] = {
        "connect_timeout": limits.connect_timeout_s,
        "request_timeout": limits.timeout_s,
        "retry_strategy": AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    }
    if meta.region_name not in (None, "aws-global"):
        options["region"] = meta.region_name
    endpoint = urlsplit(meta.endpoint_url)
    if not (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
        options |= {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
    return join(place.bucket, place.prefix, prefix), S3FileSystem(**options)
