import pickle
from types import SimpleNamespace

import pytest
import ray.exceptions
from ray.train import TrainingFailedError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from draftline.errors import RunFailed, one_line
from draftline.hidden_states.store import StoreUnavailable
from draftline.hidden_states.watch import MasterGone
from draftline.storage.store import DiskFull, StoreFailed
from draftline.training.fail_fast import FailFast
from draftline.training.failures import FeederGone, TrainingFailed, cause_of, is_final, origin

DEAD = ray.exceptions.ActorDiedError()
GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5")


def of_workers(*errors: Exception) -> WorkerGroupError:
    wrapped = {rank: UserExceptionWithTraceback(error, "Traceback ...") for rank, error in enumerate(errors)}
    return pickle.loads(pickle.dumps(WorkerGroupError("as Ray says", wrapped)))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (DEAD, "workers"),
        (WorkerGroupError("", {0: WorkerHealthCheckFailedError("it is gone", failure=DEAD)}), "workers"),
        (of_workers(GLOO), "workers"),
        (of_workers(FeederGone("the feeder is gone"), GLOO), "feeder"),
        (of_workers(GLOO, FeederGone("the feeder is gone")), "feeder"),
        (of_workers(StoreFailed("the bucket refuses")), "store"),
        (of_workers(DiskFull("the disk is full")), "store"),
        (of_workers(OSError("When uploading part: AWS Error SLOW_DOWN during UploadPart operation")), "store"),
        (of_workers(StoreUnavailable("cannot join")), "master"),
        (of_workers(MasterGone("no other one came within 60 s")), "master"),
        (of_workers(ValueError("a mistake")), "stage"),
        (of_workers(RunFailed("a check")), "stage"),
        (ControllerError(FeederGone("the feeder is gone")), "feeder"),
        (TrainingFailed("feeder", "gone"), "feeder"),
        (TrainingFailed("stage", "a mistake"), "stage"),
    ],
)
def test_the_lost_part_is_found_behind_ray_s_wrappers(error: Exception, lost: str) -> None:
    assert cause_of(error) == lost


def test_the_cause_survives_an_actor_s_boundary() -> None:
    failed = TrainingFailed("feeder", one_line(origin(of_workers(GLOO, FeederGone("the feeder is gone")))))
    crossed = ray.exceptions.RayTaskError("run", "Traceback ...", failed).as_instanceof_cause()
    assert isinstance(crossed, TrainingFailed)
    assert cause_of(crossed) == "feeder"
    assert one_line(origin(crossed)) == "TrainingFailed: training failed (feeder): FeederGone: the feeder is gone"
    again = pickle.loads(pickle.dumps(failed))
    assert (again.lost, str(again)) == ("feeder", "training failed (feeder): FeederGone: the feeder is gone")


def test_what_lies_behind_a_feeder_s_death_does_not_hide_it() -> None:
    try:
        raise FeederGone("the feeder is gone") from DEAD
    except FeederGone as error:
        assert cause_of(error) == "feeder"
        assert origin(error) is error


def test_only_what_cannot_be_helped_is_final() -> None:
    final = (FeederGone("x"), StoreFailed("x"), StoreUnavailable("x"), RunFailed("x"))
    assert all(is_final(of_workers(error)) for error in final)
    assert not any(is_final(of_workers(error)) for error in (GLOO, ValueError("x"), DEAD))
    assert isinstance(of_workers(GLOO), TrainingFailedError)


def test_only_losses_that_a_new_start_mends_are_told_and_the_others_raised() -> None:
    told: list[str] = []
    board = SimpleNamespace(lost=SimpleNamespace(remote=told.append))
    FailFast(board).after_exception(None, {1: GLOO, 0: WorkerHealthCheckFailedError("gone", failure=DEAD)})
    assert [what.partition(": ")[0] for what in told] == ["train worker 0"]
    with pytest.raises(FeederGone):
        FailFast(board).after_exception(None, {0: DEAD, 1: FeederGone("the feeder is gone")})
    FailFast().after_exception(None, {0: DEAD})
    assert len(told) == 1
