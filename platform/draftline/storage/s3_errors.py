"""What S3's errors mean: which pass by themselves, and what to do about the others, in one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto
from s3transfer.exceptions import RetriesExceededError

from draftline.storage.store import StoreFailed

_CONNECTION = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    RetriesExceededError,
)
_NEVER_PASSES = (boto.SSLError, boto.ProxyConnectionError)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.UnauthorizedSSOTokenError,
    boto.SSOTokenLoadError,
)
_PASSING_CODES = {
    "BadDigest",  # the body was damaged on its way
    "ConditionalRequestConflict",  # two conditional writes at the same moment: the next try says who won
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_ADVICE = {
    "AccessDenied": "the credentials may not do that: allow them s3:GetObject, s3:PutObject, s3:DeleteObject, "
    "s3:AbortMultipartUpload and s3:ListBucket there",
    "InvalidAccessKeyId": "the store does not know the access key: check AWS_ACCESS_KEY_ID or AWS_PROFILE, and "
    "whether the endpoint is the one that the key is for",
    "SignatureDoesNotMatch": "the secret key is not the access key's: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": "the credentials have expired: get new ones (and a new AWS_SESSION_TOKEN), then run again",
    "InvalidToken": "AWS_SESSION_TOKEN is not valid: get new credentials, or unset it for keys that need none",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION to that one",
    "PermanentRedirect": "the bucket is in another region or at another endpoint: set AWS_REGION or "
    "AWS_ENDPOINT_URL_S3",
    "NotImplemented": "this store lacks what draftline needs (checksums, conditional writes): use another one",
    "EntityTooLarge": "the object is larger than the store takes",
    "QuotaExceeded": "the store's quota is used up: make room and run again",
    "XMinioStorageFull": "the store is full: make room and run again",
}
_SAME = {
    "403": "AccessDenied",
    "Forbidden": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "UnauthorizedAccess": "AccessDenied",
    "TokenRefreshRequired": "ExpiredToken",
    "ExpiredTokenException": "ExpiredToken",
    "RequestExpired": "ExpiredToken",
    "InvalidClientTokenId": "InvalidAccessKeyId",
    "301": "PermanentRedirect",
}


def passes(error: Exception) -> bool:
    """Whether trying again may help: overload, timeouts, broken connections, bytes damaged on their way."""
    if isinstance(error, boto.ClientError):
        status = _status(error)
        return code_of(error) in _PASSING_CODES or status == 429 or (status >= 500 and status != 501)
    return isinstance(error, _CONNECTION) and not isinstance(error, _NEVER_PASSES)


def code_of(error: Exception) -> str:
    """S3's code for an error (`NoSuchKey`; the status where a HEAD has no more), or ''."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def is_absent(error: Exception) -> bool:
    """Whether the object does not exist. HEAD says that by status alone, also when it is the bucket that is missing."""
    return code_of(error) in ("NoSuchKey", "404")


def lost_condition(error: Exception) -> bool:
    """Whether a conditional write lost: the object is another version, exists, or (If-Match) does not exist."""
    return code_of(error) in ("PreconditionFailed", "412", "NoSuchKey", "404")


def client_error(entry: Mapping[str, Any], operation: str) -> boto.ClientError:
    """The error of one object of a request for many, which S3 answers with status 200."""
    return boto.ClientError({"Error": {"Code": entry.get("Code", ""), "Message": ""}}, operation)


def store_failure(error: Exception, url: str, endpoint: str, patience_s: float) -> StoreFailed | None:
    """The message about an error of boto3's, or None for one that is not the store's.

    `url` names the object or place. What the server wrote is left out, nobody knows what is in it; of the endpoint's
    URL, all but scheme, host and port.
    """
    place = urlsplit(endpoint)
    endpoint = f"{place.scheme}://{place.netloc.rpartition('@')[2]}"
    tried = f"still so after {patience_s:g} s of trying; is the store overloaded? Run again later to resume"
    if isinstance(error, boto.ClientError):
        return StoreFailed(f"{url}: {_client_advice(error, url, endpoint, tried)}")
    if isinstance(error, _NO_CREDENTIALS):
        return StoreFailed(
            f"{url}: found no complete credentials ({type(error).__name__}); set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every machine of the cluster"
        )
    if isinstance(error, boto.SSLError):
        return StoreFailed(f"{url}: the certificate of {endpoint} is not trusted; set AWS_CA_BUNDLE, or mend it")
    if isinstance(error, boto.ProxyConnectionError):
        return StoreFailed(f"{url}: the proxy cannot be reached; check HTTP_PROXY, HTTPS_PROXY and NO_PROXY")
    if isinstance(error, boto.ReadTimeoutError | boto.ConnectTimeoutError):
        return StoreFailed(f"{url}: {endpoint} does not answer in time ({type(error).__name__}), {tried}")
    if isinstance(error, boto.EndpointConnectionError):
        return StoreFailed(
            f"{url}: cannot reach {endpoint}; check AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL), the network and whether "
            "the store runs"
        )
    if isinstance(error, _CONNECTION):
        return StoreFailed(f"{url}: the connection to {endpoint} broke ({type(error).__name__}), {tried}")
    if isinstance(error, boto.BotoCoreError):
        return StoreFailed(f"{url}: boto3 cannot do that ({type(error).__name__}); check the AWS_* settings")
    return None


def _client_advice(error: boto.ClientError, url: str, endpoint: str, tried: str) -> str:
    code = code_of(error)
    if code == "NoSuchBucket":
        return f"there is no such bucket at {endpoint}; make it, or correct the recipe's store or AWS_ENDPOINT_URL_S3"
    if advice := _ADVICE.get(_SAME.get(code, code)):
        return f"{error.operation_name} was refused ({code}): {advice}"
    status = _status(error)
    if passes(error):
        return f"{error.operation_name} failed ({code or status}), {tried}"
    return f"{error.operation_name} was refused ({code}, status {status})"


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
