"""Keys, the URLs of stores, and how long is waited between tries."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import InputError
from draftline.storage.artifacts import store_url
from draftline.storage.keys import below, checked_key, is_reserved, join, key_problem
from draftline.storage.local import LocalStore
from draftline.storage.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, pauses, persist
from draftline.storage.s3 import S3Store
from draftline.storage.s3_client import MOST_PARTS, SMALLEST_PART_BYTES, S3Limits, make_client
from draftline.storage.store import open_store

parts = st.text(st.characters(exclude_characters="/", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(
    lambda part: part not in (".", "..") and not is_reserved(part)
)
keys = st.lists(parts, min_size=1, max_size=5).map("/".join)


@given(keys, keys)
def test_a_key_below_a_prefix_is_a_key_and_comes_back(prefix: str, key: str) -> None:
    whole = join(prefix, key)
    assert checked_key(whole) == whole
    assert whole.removeprefix(below(prefix)) == key
    assert not (prefix + "x").startswith(below(prefix)), "a neighbour whose name starts the same is not below it"


@given(keys)
def test_an_empty_prefix_changes_nothing(key: str) -> None:
    assert join("", key) == key
    assert key.startswith(below(""))


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a/../b", ".", "a\nb", "a/\ud800", "a/.b.x.tmp", ".store.lock", "k" * 1025]
)
def test_keys_that_no_store_takes(key: str) -> None:
    assert key_problem(key)
    with pytest.raises(ValueError, match="no key of the artifact store"):
        checked_key(key)


def test_urls_name_a_folder_or_a_bucket(tmp_path: object) -> None:
    local = open_store(f"{tmp_path}/runs")
    assert isinstance(local, LocalStore) and local.folder is not None and local.url == f"{tmp_path}/runs"
    remote = open_store("s3://bucket/a/b/")
    assert isinstance(remote, S3Store) and remote.folder is None and remote.url == "s3://bucket/a/b"
    assert open_store("s3://bucket").url == "s3://bucket"


@pytest.mark.parametrize(
    "url",
    ["", " ", "gs://b/p", "file:///tmp/x", "file:x", "s3://", "s3:///p", "s3://B_/p", "s3://b?x", "s3:b", "S3:/b/x"],
)
def test_other_urls_are_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(InputError, match=re.escape("s3://BUCKET/PREFIX")):
        open_store(store_url(url))


def test_a_folders_check_leaves_nothing_and_names_the_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "store")
    store.check()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("a file")
    with pytest.raises(InputError, match=r"^store: .*/a/store/?: a file is where a folder should be"):
        store.check()


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hidden@bucket/p",
        "s3://AKIA:hid/hidden@bucket/p",
        "s3://AKIA%3Ahidden%40bucket/p",
        "s3://b_/p?token=hidden",
        "https://user:hidden@host/p",
    ],
)
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(InputError) as error:
        open_store(url)
    assert "hidden" not in str(error.value)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_pauses_grow_to_a_limit_and_are_spread(jitters: list[float]) -> None:
    given_jitters = iter(jitters)
    schedule = pauses(lambda: next(given_jitters))
    for count, jitter in enumerate(jitters):
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**count)
        assert next(schedule) == pytest.approx(longest * (0.5 + 0.5 * jitter))


class Clock:
    """Time that passes only by sleeping and trying."""

    def __init__(self, try_s: float) -> None:
        self.now, self.try_s, self.tries = 0.0, try_s, 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def fail(self) -> None:
        self.now += self.try_s
        self.tries += 1
        raise TimeoutError


@given(st.floats(0, 300), st.floats(0, 100))
def test_patience_ends_and_starts_with_the_first_failure(patience_s: float, try_s: float) -> None:
    clock = Clock(try_s)
    with pytest.raises(TimeoutError):
        persist(clock.fail, lambda _: True, patience_s, clock=lambda: clock.now, sleep=clock.sleep)
    assert clock.now <= try_s + patience_s + try_s, "the first try, the patience, and the try that was under way"
    assert clock.tries >= 2 or patience_s < FIRST_PAUSE_S, "a long first try leaves all of the patience"


def test_what_does_not_pass_is_raised_at_once() -> None:
    clock = Clock(1.0)
    with pytest.raises(TimeoutError):
        persist(clock.fail, lambda _: False, 100.0, clock=lambda: clock.now, sleep=clock.sleep)
    assert clock.tries == 1


@given(st.integers(0, 5 << 40), st.integers(SMALLEST_PART_BYTES, 1 << 30))
def test_no_file_has_more_parts_than_s3_takes(file_bytes: int, part_bytes: int) -> None:
    used = S3Limits(part_bytes=part_bytes).part_bytes_for(file_bytes)
    assert used >= part_bytes
    assert -(-file_bytes // used) <= MOST_PARTS


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_PROFILE", "none", "AWS_PROFILE names a profile"),
        ("AWS_DEFAULT_REGION", "x/../@evil", "is no region"),
        ("AWS_SECRET_ACCESS_KEY", "", "half of the credentials"),
        ("AWS_ENDPOINT_URL_S3", "http://u:hid/hidden@host:1", "has a user name or a password"),
        ("AWS_ENDPOINT_URL_S3", "http://host:hidden", "is no URL"),
        ("AWS_ENDPOINT_URL_S3", "ftp://host", "is no URL"),
        ("AWS_DEFAULTS_MODE", "hidden", "cannot use the AWS settings"),
    ],
)
def test_settings_that_make_no_client(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "hidden")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^store: .*{said}") as error:
        make_client(S3Limits())
    assert "hidden" not in str(error.value)
