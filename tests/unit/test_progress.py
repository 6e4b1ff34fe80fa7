"""Progress lines: what they say, and how often."""

import io
import time

from draftline.runs.progress import Progress, duration, time_table


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(stream: io.StringIO) -> list[str]:
    return [line for line in stream.getvalue().splitlines() if line]


def test_counts_show_rate_figures_and_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    progress.stage("train", "400 steps")
    progress({"unit": "step", "done": 0, "total": 400, "loss": 3.0})
    clock.now = 40.0
    progress({"unit": "step", "done": 120, "total": 400, "loss": 1.2345, "eal": 1.45})
    assert lines(stream) == [
        "== train: 400 steps",
        "[train] step 0/400  loss 3",
        "[train] step 120/400  3.0 steps/s  loss 1.234  eal 1.45  1m33s left",
    ]


def test_lines_are_rate_limited_but_the_last_one_comes_once() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock, every_s=5.0)
    progress.stage("prepare")
    for done in range(101):
        clock.now = done * 0.1
        progress.update({"unit": "sample", "done": done, "total": 100})
    progress.update({"unit": "sample", "done": 100, "total": 100})
    said = lines(stream)[1:]
    assert [line.split("  ")[0] for line in said] == [
        "[prepare] sample 0/100",
        "[prepare] sample 50/100",
        "[prepare] sample 100/100",
    ]
    assert said[-1].endswith("in 10 s")


def test_a_resumed_count_does_not_boast() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    progress.update({"done": 300, "total": 400})
    clock.now = 10.0
    progress.update({"done": 310, "total": 400})
    assert lines(stream)[-1] == "[run] step 310/400  1.0 steps/s  1m30s left"


def test_slow_work_is_said_in_seconds_per_step() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    progress.update({"done": 0, "total": 3})
    clock.now = 60.0
    progress.update({"done": 2, "total": 3})
    assert lines(stream)[-1] == "[run] step 2/3  30 s/step  30 s left"


def test_long_waits_say_what_they_wait_for() -> None:
    stream = io.StringIO()
    progress = Progress(stream, every_s=0.05)
    progress.stage("prepare")
    with progress.waiting("a short thing"):
        pass
    with progress.waiting("the target replica to start"):
        time.sleep(0.2)
    said = lines(stream)[1:]
    assert 1 <= len(said) <= 4
    assert set(said) == {"[prepare] waiting for the target replica to start: 0 s"}


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 250, 3599.7, 7500)] == [
        "0 s",
        "59 s",
        "1m00s",
        "4m10s",
        "1h00m",
        "2h05m",
    ]


def test_time_table_adds_up() -> None:
    table = time_table({"time.prepare_s": 60.0, "time.train_s": 120.0, "time.total_s": 200.0, "train.eal_start": 1.0})
    assert table.splitlines() == [
        "where the time went",
        "  prepare        1m00s    30%",
        "  train          2m00s    60%",
        "  other           20 s    10%",
        "  total          3m20s   100%",
    ]
