"""What every artifact store promises, kept by a folder and by S3; and what S3's failures lead to.

S3 is moto's server, over HTTP; `DRAFTLINE_TEST_S3=s3://bucket/prefix`, with the usual AWS_* variables, names another.
"""

import hashlib
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from draftline.errors import InputError
from draftline.recipe.schema import Recipe
from draftline.runs.attempts import run_stage
from draftline.runs.context import RunContext
from draftline.runs.frame import RunFrame, Stage
from draftline.runs.progress import Progress
from draftline.runs.record import read_record
from draftline.runs.stopping import StopRequested
from draftline.storage.keys import S3Place, parse_s3_url
from draftline.storage.local import LocalStore
from draftline.storage.ray_storage import ray_storage
from draftline.storage.s3 import S3Store
from draftline.storage.s3_client import S3Limits
from draftline.storage.store import ArtifactStore, Conflict, Damaged, NotFound, StoreFailed, probe
from draftline.storage.workspace import Workspace, working_folder
from s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, Fault, FaultyProxy, s3_environment, s3_server

LIMITS = S3Limits(part_bytes=5 << 20, transfers=4)
HASTY = replace(LIMITS, patience_s=3.0, timeout_s=2.0, attempts=1)
REAL_S3 = os.environ.get("DRAFTLINE_TEST_S3")


@pytest.fixture(scope="module")
def s3_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Place]:
    with pytest.MonkeyPatch.context() as patch:
        if REAL_S3:
            yield parse_s3_url(REAL_S3)
            return
        with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
            for name, value in s3_environment(endpoint).items():
                patch.setenv(name, value) if value is not None else patch.delenv(name, raising=False)
            yield S3Place(BUCKET, "tests")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArtifactStore]:
    if request.param == "folder":
        yield LocalStore(tmp_path / "store")
    else:
        yield from own_prefix(request.getfixturevalue("s3_place"), LIMITS)


@pytest.fixture
def s3(s3_place: S3Place) -> Iterator[S3Store]:
    """Soon out of patience, so that failures are seen."""
    yield from own_prefix(s3_place, HASTY)


def own_prefix(place: S3Place, limits: S3Limits) -> Iterator[S3Store]:
    store = S3Store(S3Place(place.bucket, f"{place.prefix}/{uuid.uuid4().hex}"), limits)
    yield store
    if REAL_S3:
        store.delete(store.keys(""))


@pytest.fixture
def proxy(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Between `s3`, whose client is not made yet, and the server."""
    if REAL_S3:
        pytest.skip("faults are put in front of moto's server only: another checks the signature of the host's name")
    proxy = FaultyProxy(os.environ["AWS_ENDPOINT_URL_S3"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    yield proxy
    proxy.close()


def made(file: Path, size: int = 1000, seed: bytes = b"a") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes((hashlib.sha256(seed).digest() * (size // 32 + 1))[:size])
    return file


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# The contract.


@pytest.mark.parametrize("data", [b"", b"draft" * 1000])
@pytest.mark.parametrize("key", ["a", "a/b.json", "ä b/日本+%41?#&=.bin"])
def test_what_was_written_is_read(store: ArtifactStore, key: str, data: bytes) -> None:
    version = store.write(key, data)
    assert (found := store.read(key)).data == data and found.version == version
    assert store.sha256(key) == store.noted_sha256(key) == digest(data)
    assert store.keys("") == [key]
    store.write(key, b"other")
    assert store.read(key).data == b"other"


@pytest.mark.parametrize("size", [0, 1000, 5 << 20, (12 << 20) + 7])
def test_files_travel_whole(store: ArtifactStore, tmp_path: Path, size: int) -> None:
    file, back = made(tmp_path / "out.bin", size), tmp_path / "new" / "back.bin"
    sha256 = store.upload(file, "x/out.bin")
    assert sha256 == store.sha256("x/out.bin") == store.noted_sha256("x/out.bin") == digest(file.read_bytes())
    store.download("x/out.bin", back, sha256)
    assert back.read_bytes() == file.read_bytes()
    assert [path.name for path in back.parent.iterdir()] == ["back.bin"]


def test_what_is_absent_is_said_to_be(store: ArtifactStore, tmp_path: Path) -> None:
    store.write("a/b", b"1")
    for key in ("a/c", "a", "a/b/c"):
        for ask in (store.read, store.sha256, lambda key: store.download(key, tmp_path / "f", "0" * 64)):
            with pytest.raises(NotFound, match=f"no object {key!r}"):
                ask(key)
        assert store.noted_sha256(key) is None
    assert not (tmp_path / "f").exists()


def test_keys_are_those_below_a_folder(store: ArtifactStore) -> None:
    assert store.keys("") == store.keys("a") == []
    names = ["a/1", "a/b/2", "ab/3", "a.x", "z"]
    for key in names:
        store.write(key, b"")
    assert store.keys("") == sorted(names)
    assert store.keys("a") == store.keys("a/") == ["a/1", "a/b/2"]
    assert store.keys("a/b") == ["a/b/2"]
    assert store.keys("a/1") == store.keys("b") == []
    store.delete(["a/1", "absent", "ab/3"])
    assert store.keys("") == ["a.x", "a/b/2", "z"]
    store.delete([])


def test_keys_that_mean_different_things_elsewhere_are_refused(store: ArtifactStore) -> None:
    for key in ("", "../a", "/a", "a//b"):
        with pytest.raises(ValueError, match="no key"):
            store.write(key, b"")


def test_a_conditional_write_needs_the_version_that_is_there(store: ArtifactStore) -> None:
    first = store.write_if("r", b"1", None)
    with pytest.raises(Conflict):
        store.write_if("r", b"x", None)
    second = store.write_if("r", b"2", first)
    with pytest.raises(Conflict):
        store.write_if("r", b"x", first)
    with pytest.raises(Conflict):
        store.write_if("absent", b"x", first)
    assert store.read("r").data == b"2" and store.read("r").version == second
    assert store.keys("") == ["r"]


@pytest.mark.parametrize("exists", [False, True])
def test_of_many_writers_exactly_one_wins(store: ArtifactStore, exists: bool) -> None:
    version = store.write("r", b"old") if exists else None
    together, won, lost = threading.Barrier(8), [], []

    def write(number: int) -> None:
        mine = pickle.loads(pickle.dumps(store)) if number % 2 else store
        together.wait()
        try:
            won.append((number, mine.write_if("r", b"%d" % number, version)))
        except Conflict as error:
            lost.append(str(error))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7
    found = store.read("r")
    assert (found.data, found.version) == (b"%d" % won[0][0], won[0][1])


def test_damage_is_found_and_the_old_file_stays(store: ArtifactStore, tmp_path: Path) -> None:
    sha256 = store.upload(made(tmp_path / "out"), "out")
    store.write("out", b"changed by someone")
    old = made(tmp_path / "old", seed=b"b")
    with pytest.raises(Damaged, match="out is damaged"):
        store.download("out", old, sha256)
    assert old.read_bytes() == made(tmp_path / "same", seed=b"b").read_bytes()
    assert store.sha256("out") != sha256 and store.noted_sha256("out") != sha256
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "old", "same", "store"}


def test_a_store_travels(store: ArtifactStore) -> None:
    store.write("a", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.read("a").data == b"1" and (copy.url, copy.folder) == (store.url, store.folder)
    assert SECRET_KEY.encode() not in pickle.dumps(store)


def test_a_good_store_passes_its_check_and_stays_empty(store: ArtifactStore) -> None:
    store.check()
    assert store.keys("") == []


# The folder's own.


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.write("out", b"old")
    made(tmp_path / "big", 4 << 20)
    program = (
        "import resource, sys; from pathlib import Path; from draftline.storage.local import LocalStore\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {resource.RLIM_INFINITY}))\n"
        f"LocalStore(Path({str(tmp_path / 'store')!r})).upload(Path({str(tmp_path / 'big')!r}), 'out')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1 and "StoreFailed" in ended.stderr and "File too large" in ended.stderr
    assert store.read("out").data == b"old" and store.keys("") == ["out"]


def test_a_folder_that_cannot_be_one_is_bad_input(tmp_path: Path) -> None:
    made(tmp_path / "file")
    with pytest.raises(InputError, match=r"store: .*/file/store.*a file is where a folder should be"):
        LocalStore(tmp_path / "file" / "store").check()


def test_a_lock_that_is_never_let_go_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, lock_patience_s=0.1)
    with store._locked(), pytest.raises(StoreFailed, match=r"has held \.store\.lock for 0\.1 s"):
        store.write("a", b"1")
    store.write("a", b"1")


# S3's failures.


@pytest.mark.parametrize(
    "fault",
    [Fault(times=2, status=503, code="SlowDown"), Fault(times=2, reset=True), Fault(times=1, slow_s=2.5)],
    ids=["slow-down", "reset", "slow"],
)
def test_what_passes_is_waited_for(s3: S3Store, proxy: FaultyProxy, tmp_path: Path, fault: Fault) -> None:
    proxy.faults = [fault]
    s3.write("a", b"1")
    assert fault.hits == fault.times
    fault.hits = 0
    assert s3.read("a").data == b"1"
    assert fault.hits == fault.times


def test_a_part_that_fails_is_sent_again(s3: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    file = made(tmp_path / "big", 11 << 20)
    proxy.faults = [fault := Fault("PUT", "partNumber=2", times=1, reset=True)]
    sha256 = s3.upload(file, "big")
    assert fault.hits == 1 and s3.sha256("big") == sha256 == digest(file.read_bytes())


def test_a_body_that_is_cut_short_is_fetched_again(s3: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    data = made(tmp_path / "big", 4 << 20).read_bytes()
    sha256 = s3.upload(tmp_path / "big", "big")
    proxy.faults = [fault := Fault("GET", "/big", times=2, truncate=True)]
    assert s3.read("big").data == data and fault.hits == 2
    fault.hits = 0
    assert s3.sha256("big") == sha256 and fault.hits == 2
    fault.hits = 0
    s3.download("big", tmp_path / "back", sha256)
    assert (tmp_path / "back").read_bytes() == data and fault.hits == 2


def test_a_conditional_write_whose_answer_was_lost_has_won(s3: S3Store, proxy: FaultyProxy) -> None:
    proxy.faults = [fault := Fault("PUT", times=1, lose_answer=True)]
    first = s3.write_if("r", b"1", None)
    fault.hits = 0
    second = s3.write_if("r", b"2", first)
    assert fault.hits == 1 and (s3.read("r").data, s3.read("r").version) == (b"2", second)


def test_an_upload_that_never_ends_well_leaves_the_old_object(s3: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    s3.write("big", b"old")
    proxy.faults = [Fault("PUT", "partNumber=2", reset=True)]
    with pytest.raises(StoreFailed, match=r"big: the connection to .* broke"):
        s3.upload(made(tmp_path / "big", 11 << 20), "big")
    assert s3.read("big").data == b"old" and s3.keys("") == ["big"]
    where = {"Bucket": s3.place.bucket, "Prefix": s3.place.prefix}
    assert not s3.client().list_multipart_uploads(**where).get("Uploads"), "parts that nobody will finish cost money"


def test_an_overloaded_store_ends_in_a_message(s3: S3Store, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault(status=503, code="SlowDown")]
    with pytest.raises(StoreFailed, match=r"SlowDown\), still so after 3 s of trying"):
        s3.write("a", b"1")
    assert 3 <= len(proxy.requests) <= 20


REFUSALS = {"AccessDenied": "s3:PutObject", "ExpiredToken": "have expired", "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID"}


@pytest.mark.parametrize("code", REFUSALS)
def test_refusals_are_not_tried_again_and_hold_no_secret(
    s3: S3Store, proxy: FaultyProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    caplog.set_level(logging.INFO)
    proxy.faults = [Fault(status=403, code=code)]
    file = made(tmp_path / "f")
    tries: list[Callable[[], object]] = [
        lambda: s3.write("a", b"1"),
        lambda: s3.write_if("a", b"1", None),
        lambda: s3.upload(file, "a"),
        lambda: s3.read("a"),
        lambda: s3.keys(""),
        lambda: s3.delete(["a"]),
    ]
    for attempt in tries:
        before = len(proxy.requests)
        with pytest.raises(StoreFailed) as error:
            attempt()
        assert REFUSALS[code] in str(error.value) and len(proxy.requests) == before + 1
        assert SECRET_KEY not in str(error.value) + caplog.text and ACCESS_KEY not in str(error.value) + caplog.text
    with pytest.raises(InputError, match=f"store: .*{REFUSALS[code]}"):
        s3.check()


def test_a_store_without_conditional_writes_is_refused(s3: S3Store) -> None:
    def ignore(request: Any, **_event: Any) -> None:
        del request.headers["If-None-Match"]

    s3.client().meta.events.register("before-sign.s3.PutObject", ignore)
    with pytest.raises(StoreFailed, match="ignores conditional writes"):
        probe(s3)
    assert s3.keys("") == []


def test_a_bucket_that_does_not_exist(s3_place: S3Place) -> None:
    with pytest.raises(InputError, match=r"store: s3://no-such-bucket-anywhere/p/.*no such bucket at http"):
        S3Store(S3Place("no-such-bucket-anywhere", "p"), HASTY).check()


def test_no_credentials(s3_place: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(InputError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        S3Store(s3_place, HASTY).check()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://127.0.0.1:1", "cannot reach http://127.0.0.1:1"),
        ("no url", "is no URL"),
        ("http://user:hidden@127.0.0.1:1", "has a user name or a password"),
    ],
)
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_endpoints_that_are_none(
    s3_place: S3Place, monkeypatch: pytest.MonkeyPatch, variable: str, endpoint: str, said: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(InputError, match=said) as error:
        S3Store(s3_place, replace(HASTY, patience_s=0.3)).check()
    assert "hidden" not in str(error.value)


# A run's working folder.


@pytest.fixture
def workspace(store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("DRAFTLINE_CACHE", str(tmp_path / "cache"))
    return Workspace(store, "run", working_folder(store, "run"))


def lose(workspace: Workspace) -> None:
    """The machine goes, unless the store is on it."""
    if workspace.store.folder is None:
        shutil.rmtree(workspace.folder)


def test_where_a_run_works(store: ArtifactStore, workspace: Workspace, tmp_path: Path) -> None:
    expected = tmp_path / "store" if store.folder else tmp_path / "cache" / "work"
    assert workspace.folder.is_relative_to(expected) and workspace.folder.name == "run"


def test_what_was_published_outlives_the_machine(workspace: Workspace) -> None:
    files = [made(workspace.folder / name, seed=name.encode()) for name in ("draft/config.json", "draft/ä/x", "plan")]
    made(workspace.folder / "draft" / ".x.abc.tmp")
    outputs = workspace.publish(workspace.folder / "draft", workspace.folder / "plan")
    assert outputs == {workspace.name(file): digest(file.read_bytes()) for file in files}
    assert workspace.names("") == ["draft/config.json", "draft/ä/x", "plan"]
    assert workspace.names("draft") == ["draft/config.json", "draft/ä/x"]
    lose(workspace)
    there = pickle.loads(pickle.dumps(workspace))
    assert there.fetch(outputs) == []
    assert all((there.folder / name).read_bytes() for name in outputs)


def test_what_the_store_lost_or_changed_is_named(workspace: Workspace) -> None:
    names = ["a", "b", "c"]
    outputs = workspace.publish(*[made(workspace.folder / name) for name in names])
    workspace.store.delete(["run/a"])
    workspace.store.write("run/b", b"changed")
    assert workspace.fetch(outputs) == ["a", "b"], "even though this machine may still have them"
    again = workspace.publish(*[made(workspace.folder / name) for name in names])
    assert again == outputs and workspace.fetch(outputs) == []


def test_what_is_stored_already_is_not_sent_again(s3: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    workspace = Workspace(s3, "run", tmp_path / "work")
    files = [made(tmp_path / "work" / name) for name in ("a", "b")]
    workspace.publish(*files)
    made(files[1], seed=b"new")
    proxy.requests.clear()
    workspace.publish(*files)
    assert [request.rpartition("/")[2] for request in proxy.requests if request.startswith("PUT")] == ["b"]


def test_a_folder_is_whole_once_its_manifest_is_there(s3: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    workspace = Workspace(s3, "run", tmp_path / "work")
    folder = tmp_path / "work" / "step-1"
    for name in ("manifest.json", "a.bin", "z.bin", "old.bin"):
        made(folder / name)
    workspace.publish_folder(folder)
    sent = [request.rpartition("/")[2] for request in proxy.requests if request.startswith("PUT")]
    assert len(sent) == 4 and sent[-1] == "manifest.json"
    (folder / "old.bin").unlink()
    made(folder / "a.bin", seed=b"new")
    made(folder / "manifest.json", seed=b"new")
    proxy.faults = [fault := Fault("PUT", "/a.bin", status=403, code="AccessDenied")]
    with pytest.raises(StoreFailed):
        workspace.publish_folder(folder)
    assert workspace.names("step-1") == ["step-1/a.bin", "step-1/z.bin"], "half a folder has no manifest"
    fault.times = 0
    assert workspace.fetch(workspace.publish_folder(folder)) == []
    assert workspace.names("step-1") == ["step-1/a.bin", "step-1/manifest.json", "step-1/z.bin"]


def test_a_folder_without_a_manifest_is_a_mistake(workspace: Workspace) -> None:
    made(workspace.folder / "step-1" / "a")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        workspace.publish_folder(workspace.folder / "step-1")


def test_what_is_removed_is_gone_in_both_places(workspace: Workspace) -> None:
    folder = workspace.folder / "step-1"
    for name in ("manifest.json", "a"):
        made(folder / name)
    made(workspace.folder / "kept")
    workspace.publish_folder(folder)
    workspace.publish(workspace.folder / "kept")
    workspace.remove(*workspace.names("step-1"), "step-1/never-there")
    assert workspace.names("") == ["kept"] and not folder.exists() and workspace.folder.exists()


def test_ray_train_writes_where_the_store_reads(store: ArtifactStore) -> None:
    path, filesystem = ray_storage(store, "run/train")
    if filesystem is None:
        assert path == f"{store.folder}/run/train"
        return
    filesystem = pickle.loads(pickle.dumps(filesystem))
    filesystem.create_dir(f"{path}/empty")
    with filesystem.open_output_stream(f"{path}/state") as file:
        file.write(b"state")
    assert store.read("run/train/state").data == b"state"
    assert store.keys("run") == ["run/train/state"], "a folder's mark is no object"


# A run whose store fails, record and all.


@dataclass
class Outage(Fault):
    """A fault of everything that is sent, for so long."""

    until: float = 0.0

    def takes(self, method: str, path: str) -> bool:
        return time.monotonic() < self.until and super().takes(method, path)


@pytest.mark.parametrize(
    "outage",
    [{"status": 503, "code": "SlowDown"}, {"slow_s": 2.5}, {"reset": True}],
    ids=["refusing", "slow", "resetting"],
)
def test_a_run_goes_on_when_its_store_does(
    s3: S3Store, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage: dict[str, Any]
) -> None:
    monkeypatch.setenv("DRAFTLINE_CACHE", str(tmp_path / "cache"))
    values = {"target": {"path": "t"}, "data": {"prompts": "p"}, "draft": {"tap_layers": [0]}}
    recipe = Recipe.model_validate({"run_id": "run", "failures": {"pause_s": 0.0}, **values})
    actors = SimpleNamespace(close=lambda: None)
    proxy.faults = [fault := Outage("PUT", **outage)]

    def body(context: RunContext, stage: Stage) -> None:
        if not fault.until:
            fault.until = time.monotonic() + HASTY.patience_s + 4.0
        stage.made(made(context.frame.folder.path / "made.txt"))

    with (
        pytest.raises(StopRequested),
        RunFrame.open(s3, recipe, Progress()) as frame,
        frame.running(),
    ):
        run_stage(cast(RunContext, SimpleNamespace(frame=frame, actors=actors)), "prepare", body)
        raise StopRequested("the rest is not wanted")
    record = read_record(s3, "run").record
    kept = record.stages["prepare"]
    assert fault.hits and kept.state == "done" and len(kept.attempts) >= 2
    assert {(event.stage, event.cause, event.action) for event in record.events} == {("prepare", "storage", "recover")}
    assert s3.sha256("run/made.txt") == kept.outputs["made.txt"] == digest(made(tmp_path / "made").read_bytes())
