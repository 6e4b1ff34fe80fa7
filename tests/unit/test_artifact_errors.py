"""Every failure of a store says in one line what it was and what to do; and only what passes is tried again."""

import errno
import pickle

import pytest
from botocore import exceptions as boto
from botocore.exceptions import ClientError

from draftline.errors import RunFailed
from draftline.storage.local import _failure
from draftline.storage.s3_errors import passes, store_failure
from draftline.storage.store import DiskFull, NotFound, StoreFailed

URL, ENDPOINT = "s3://b/p/key", "http://store:9000"


def refused(code: str, status: int = 403) -> ClientError:
    answer = {"Error": {"Code": code, "Message": "hidden"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("error", "again", "said"),
    [
        (refused("NoSuchBucket", 404), False, "no such bucket at http://store:9000"),
        (refused("AccessDenied"), False, "s3:PutObject"),
        (refused("403"), False, "s3:PutObject"),
        (refused("InvalidAccessKeyId"), False, "AWS_ACCESS_KEY_ID"),
        (refused("SignatureDoesNotMatch"), False, "AWS_SECRET_ACCESS_KEY"),
        (refused("ExpiredToken", 400), False, "have expired"),
        (refused("RequestTimeTooSkewed"), False, "clock"),
        (refused("NotImplemented", 501), False, "use another one"),
        (refused("SlowDown", 503), True, "still so after 7 s"),
        (refused("InternalError", 500), True, "still so after 7 s"),
        (refused("Odd", 418), False, "Odd, status 418"),
        (boto.NoCredentialsError(), False, "AWS_PROFILE"),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), False, "AWS_PROFILE"),
        (boto.EndpointConnectionError(endpoint_url=ENDPOINT), True, "cannot reach http://store:9000"),
        (boto.ReadTimeoutError(endpoint_url=ENDPOINT), True, "does not answer in time"),
        (boto.ConnectTimeoutError(endpoint_url=ENDPOINT), True, "does not answer in time"),
        (boto.ConnectionClosedError(endpoint_url=ENDPOINT), True, "broke"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), True, "broke"),
        (boto.SSLError(endpoint_url=ENDPOINT, error="x"), False, "AWS_CA_BUNDLE"),
        (boto.ProxyConnectionError(proxy_url="http://user:hidden@proxy"), False, "HTTPS_PROXY"),
    ],
    ids=lambda value: value.response["Error"]["Code"] if isinstance(value, ClientError) else type(value).__name__,
)
def test_an_error_of_s3(error: Exception, again: bool, said: str) -> None:
    failure = store_failure(error, URL, f"{ENDPOINT}/hidden?hidden=1", 7.0)
    assert failure is not None
    assert passes(error) is again
    message = str(failure)
    assert said in message and message.startswith(f"{URL}: ")
    assert "\n" not in message and "hidden" not in message


def test_a_mistake_of_ours_is_not_the_stores() -> None:
    assert store_failure(TypeError("x"), URL, ENDPOINT, 7.0) is None
    assert not passes(TypeError("x"))


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, "make room"),
        (errno.EDQUOT, DiskFull, "make room"),
        (errno.EACCES, StoreFailed, "right to write"),
        (errno.EROFS, StoreFailed, "right to write"),
        (errno.EIO, StoreFailed, "mounted"),
        (errno.ENOENT, NotFound, "absent"),
    ],
)
def test_an_error_of_the_disk(number: int, kind: type[RunFailed], said: str) -> None:
    failure = _failure(OSError(number, "why"), "/store/key", "absent")
    assert type(failure) is kind and said in str(failure)
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure), "it travels from an actor to the driver"
