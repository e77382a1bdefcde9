import json
import logging
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

from elasticd.core.facts import Cause, Exit, Failure
from elasticd.core.reasons import FailureCharged, RoundFormed
from elasticd.telemetry import events, runs
from elasticd.telemetry.events import EventFile, event

FORMED = RoundFormed(1, 4, 2, Cause.START)


def formed(at: float) -> events.Event:
    return event(FORMED, at, "job", "a")


def test_an_event_says_when_where_and_what_in_words_and_in_fields() -> None:
    failed = FailureCharged(Failure("b", Exit(1, 3, -9, 5.0, "oom\nmore", log="/logs/3")), 1, 10)
    told = event(failed, 7.25, "job", "a", extra=1)
    assert (told["at"], told["event"], told["level"]) == (7.25, "failure.charged", "warning")
    assert (told["job"], told["node"], told["failed_node"], told["slot"], told["rank"]) == (
        "job",
        "a",
        "b",
        1,
        3,
    )
    assert (told["log"], told["extra"]) == ("/logs/3", 1)
    assert "rank 3 (slot 1 on b) was killed by SIGKILL" in told["text"]
    json.dumps(told)


def test_what_happened_before_there_was_a_folder_is_written_once_there_is_one(tmp_path: Path) -> None:
    place: list[Path] = []
    opened: list[Path] = []
    with EventFile(lambda: place[0] if place else None, opened.append) as file:
        file.write(formed(1))
        file.nudge()
        place.append(tmp_path)
        file.nudge()
        file.write(formed(2))
    assert [e["at"] for e in events.read([tmp_path])] == [1, 2]
    assert opened == [tmp_path]


def test_the_course_lies_beside_the_events_and_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    with EventFile(lambda: tmp_path, lambda _: None) as file:
        file.write(formed(1))
        for at in (1, 2):
            file.note({"at": at, "round": 3})
    with (tmp_path / events.TIMELINE).open("a") as half:
        half.write("[" * 100_000 + "\n")
        half.write('{"at": 3, "rou')
    assert [line["at"] for line in events.read_timeline(tmp_path)] == [1, 2]
    assert [e["event"] for e in events.read([tmp_path])] == ["round.formed"]
    assert events.read_timeline(tmp_path / "gone") == []


def test_a_removed_folder_of_events_stops_no_agent(tmp_path: Path) -> None:
    with EventFile(lambda: tmp_path / "gone", lambda _: None) as file:
        file.write(formed(1))
        file.write(formed(2))
    assert not list(tmp_path.iterdir())


def test_a_line_cut_by_a_full_disk_is_completed_later_and_logged_once(
    tmp_path: Path,
) -> None:
    said: list[logging.LogRecord] = []
    full = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)
            full.set()

    listener = Listener()
    room = len(json.dumps(formed(1))) * 3 // 2
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    logging.getLogger(events.__name__).addHandler(listener)
    try:
        with EventFile(lambda: tmp_path, lambda _: None) as file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            for at in (1, 2, 3):
                file.write(formed(at))
            assert full.wait(60.0)
            assert (tmp_path / events.FILE).stat().st_size == room, "half a line is there"
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            file.write(formed(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.getLogger(events.__name__).removeHandler(listener)
    assert [json.loads(line)["at"] for line in (tmp_path / events.FILE).open()] == [1, 2, 3, 4]
    assert len(said) == 1


def test_events_of_several_folders_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "gone")]
    for folder, times in zip(folders, ((1, 4), (2, 3)), strict=False):
        folder.mkdir()
        lines = [json.dumps(formed(at)) for at in times]
        (folder / events.FILE).write_text("\n".join([*lines, "not json", "[1]", '{"at": 9}', lines[0][:20]]))
    assert [e["at"] for e in events.read(folders)] == [1, 2, 3, 4]


def test_a_follower_sees_each_event_once_and_the_next_as_it_comes(tmp_path: Path) -> None:
    state, folder, later = tmp_path / "state", tmp_path / "first", tmp_path / "later"
    for f in (folder, later):
        f.mkdir()
    runs.note(state, "job", "a", 1.0, folder)
    seen: list[float] = []
    changed = threading.Condition()

    def look() -> None:
        for what in events.follow(
            lambda: [r.folder for r in runs.of_job(state, "job")],
            runs.job_folder(state, "job"),
            lambda started: os.dup(ends[started["pid"]]),
        ):
            with changed:
                seen.append(what["at"])
                changed.notify_all()

    def until(holds: Callable[[], bool]) -> None:
        with changed:
            assert changed.wait_for(holds, 30), seen

    def agent(number: int, at: float) -> str:
        return json.dumps(events.of_agent(events.STARTED, at, "job", "a", "here", pid=number)) + "\n"

    pipes = [os.pipe() for _ in range(2)]
    ends = dict(enumerate(read for read, _ in pipes))  # readable after the agent has ended
    (folder / events.FILE).write_text(agent(0, 1))
    following = threading.Thread(target=look, daemon=True)
    following.start()
    until(lambda: seen == [1])
    with (folder / events.FILE).open("a") as file:
        line = json.dumps(formed(2))
        file.write(line[:10])
        file.flush()
        file.write(line[10:] + "\n")
    until(lambda: seen == [1, 2])
    (later / events.FILE).write_text(agent(1, 3))
    runs.note(state, "job", "b", 2.0, later)
    until(lambda: seen == [1, 2, 3])
    os.close(pipes[0][1])  # one agent ends, and the other one continues
    with (later / events.FILE).open("a") as file:
        file.write(json.dumps(formed(4)) + "\n")
    until(lambda: seen == [1, 2, 3, 4])
    with (later / events.FILE).open("a") as file:
        file.write(json.dumps(formed(5)) + "\n")
    os.close(pipes[1][1])
    following.join(30)
    assert not following.is_alive() and seen == [1, 2, 3, 4, 5], "it ends with the last agent"
    for read, _ in pipes:
        os.close(read)


def test_runs_are_found_by_the_name_of_their_job_and_forgotten_with_their_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert runs.jobs(state) == [] and runs.of_job(state, "job") == []
    for n in range(3):
        (tmp_path / str(n)).mkdir()
        runs.note(state, "job", f"node-{n}", 100.0 + n, tmp_path / str(n))
    (tmp_path / "1").rmdir()
    assert [(r.began_at, r.node) for r in runs.of_job(state, "job")] == [(100.0, "node-0"), (102.0, "node-2")]
    assert runs.jobs(state) == ["job"]


def test_only_so_many_runs_of_a_job_are_remembered(tmp_path: Path) -> None:
    for n in range(runs.RUNS_KEPT + 5):
        runs.note(tmp_path / "state", "job", "a", 1000.0 + n, tmp_path)
    known = runs.of_job(tmp_path / "state", "job")
    assert len(known) == runs.RUNS_KEPT and known[0].began_at == 1005.0
