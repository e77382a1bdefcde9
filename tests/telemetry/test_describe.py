"""Reasons and facts in words, and as events of the log."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import get_args

import pytest
import structlog

from elasticd.core import reasons as r
from elasticd.core.facts import Cause, Exit, Failure, Laggard, Outcome, Round
from elasticd.core.facts import Phase as RoundPhase
from elasticd.core.hang.judging import Doing, Look, Verdict, Why
from elasticd.core.page_layout import Use
from elasticd.telemetry import describe, log, summary

NOW = 1000.0
FAILED = Failure(
    "node-b", Exit(1, 3, -9, NOW, "boom\nmore", "Traceback\n  line\nValueError: boom", "/logs/3")
)
HUNG = Verdict(
    Why.ASLEEP,
    (Look("b", 1, 3, 50, 31.0, Doing.ASLEEP, "job.py:88", "data loading"),),
    7,
    "all_reduce",
    "job.py:90",
)
EXAMPLES: dict[type, r.Reason] = {
    type(x): x
    for x in (
        r.BelowMinimum(3, 4, NOW + 90),
        r.BelowMemory(3, 4, 96_000_000_000, 24_000_000_000, 8, NOW + 90),
        r.Settling(3, 8, NOW + 1),
        r.AwaitingRelease(("a", "b")),
        r.AwaitingHeirs(("a",), NOW + 5),
        r.AwaitingCheckpoint(NOW + 5),
        r.AwaitingReturn(("a",), NOW + 5, more=4),
        r.CoolingDown(3, 4, NOW + 10),
        r.RoundFormed(7, 12, 3, Cause.NODE_LOST),
        r.RoundClosing(7, Cause.WORKER_FAILED, (), FAILED),
        r.FailureCharged(FAILED, 1, 10),
        r.SlotQuarantined("a", 2, NOW + 30),
        r.SlotDrained("a", 2, NOW + 600, (Laggard("a", 2, 6, 1.25),)),
        r.WorkerStraggling("a", 2, 6, 1.25),
        r.WorkerKeepsUp("a", 2, 6),
        r.SlotBad("a", 2, 6, "its driver reports XID 79"),
        r.GpuStrained("a", 2, 6, "its memory is nearly full"),
        r.GpuRelieved("a", 2, 6),
        r.JobEnded(Outcome.FAILED, "the restart budget is spent"),
        r.WorkersStarted(7, (0, 1, 2), 12),
        r.WorkersStopping(7, Cause.SCALED, 30.0),
        r.WorkersLeaving(7, Cause.GREW, True),
        r.StandbysStarted((2, 3)),
        r.StartHeldBack((2, 3), 4711),
        r.ProcessLingers(2, 4711, 10.0, 50.0),
        r.ScriptCheckpointed(7, 2, "/shared/step-100.pt"),
        r.StandbyReady(2),
        r.StandbyFailed(2, 1, "ImportError: no module named x", NOW + 1),
        r.WorkerEnded(7, 1, 3, -11, ""),
        r.WorkersHung(7, HUNG, "/logs/hang-of-round-7"),
        r.VerdictDropped(7, HUNG, 12.0),
        r.OptionWithoutEffect("--audit", Use.DATA),
        r.BatchesChanged(4, 3),
        r.TrainingBeganAgain(1234),
        r.Expelled(6, 7),
        r.LeaseLost(5.0, 7.2),
        r.LeaseLost(5.0, 0.1),
        r.StoreAway(True, NOW + 3),
        r.StoreBack(61.0),
        r.StoreFull("etcd at a:2379 is full"),
        r.StoreHasRoom(61.0),
        r.Draining(15),
        r.LeadsNow(),
        r.NameTaken(NOW + 5),
        r.PolicyDiffers(("settle_s", "restarts_max")),
    )
}


def test_there_is_an_example_of_every_reason() -> None:
    assert set(EXAMPLES) >= set(get_args(r.Reason))


@pytest.mark.parametrize("reason", EXAMPLES.values(), ids=lambda x: type(x).__name__)
def test_every_reason_has_a_sentence_and_an_event(reason: r.Reason) -> None:
    said = describe.sentence(reason, NOW)
    assert said and not said.endswith(".") and "\n" not in said
    event = describe.event(reason)
    assert "." in event.name
    json.dumps(event.fields)


def test_a_node_that_leaves_says_who_asked_for_it() -> None:
    assert describe.event(r.Draining(15)).fields == {"asked_by": "SIGTERM"}
    assert describe.event(r.Draining(0)).fields == {"asked_by": "elasticd drain"}


def test_a_failure_has_its_message_once_where_it_is_charged() -> None:
    charged, closing = (describe.event(EXAMPLES[kind]).fields for kind in (r.FailureCharged, r.RoundClosing))
    assert charged["message"] == "boom" and "message" not in closing and closing["slot"] == 1
    own = describe.event(r.RoundClosing(7, Cause.NODE_FAULT, (), FAILED))
    assert own.fields["message"] == "boom", "nobody is charged for it"


def test_an_event_says_until_when_as_people_write_it() -> None:
    assert describe.event(r.Settling(3, 8, 0.5)).fields["until"] == "1970-01-01T00:00:00.500+00:00"


def test_the_sentences_say_what_matters() -> None:
    assert describe.sentence(EXAMPLES[r.BelowMinimum], NOW) == (
        "waiting for 1 more worker: 3 of at least 4, for another 1 min 30 s"
    )
    assert describe.sentence(r.BelowMinimum(6, 4, NOW + 90, unit=4), NOW) == (
        "waiting for more workers: 6 make too few whole units of 4, for another 1 min 30 s"
    )
    assert describe.sentence(EXAMPLES[r.BelowMemory], NOW) == (
        "waiting for memory: 4 workers of 24 GB are needed to hold 96 GB of state, and 3 are there, "
        "for another 1 min 30 s"
    )
    assert describe.sentence(r.BelowMemory(2, 4, 96_000_000_000, 24_000_000_000, 2, NOW + 90), NOW) == (
        "waiting for memory: 4 workers of 24 GB are needed to hold 96 GB of state, but at most 2 may "
        "take part, for another 1 min 30 s"
    )
    assert describe.sentence(r.BelowMemory(8, 0, 384_000_000_000, 12_000_000_000, 8, NOW + 90), NOW) == (
        "waiting for workers with more memory: each of 8 needs 48 GB for its part of the state, "
        "and has 12 GB, for another 1 min 30 s"
    )
    assert describe.sentence(EXAMPLES[r.RoundFormed], NOW) == (
        "round 7 formed with 12 workers on 3 nodes: a node was lost"
    )
    charged = describe.sentence(EXAMPLES[r.FailureCharged], NOW)
    assert "rank 3 (slot 1 on node-b)" in charged and "SIGKILL" in charged and "boom" in charged


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "ended well"),
        (1, "exit code 1"),
        (-9, "SIGKILL (perhaps out of memory"),
        (-11, "SIGSEGV"),
        (137, "SIGKILL"),
        (127, "could not be started"),
        (255, "exit code 255"),
        (-99, "signal 99"),
    ],
)
def test_an_exit_is_told_in_words(code: int, says: str) -> None:
    assert says in describe.ending(code)


def test_a_worker_that_was_killed_because_it_hung_is_not_said_to_have_been_out_of_memory() -> None:
    exit = Exit(1, 3, -9, NOW, "hung: rank 3 on node b is in job.py:88", hung=True)
    by_elasticd = "was killed by elasticd: hung: rank 3 on node b is in job.py:88"
    assert describe.failure(Failure("b", exit)) == f"rank 3 (slot 1 on b) {by_elasticd}"
    ended = r.WorkerEnded(7, 1, 3, exit.code, exit.message, exit.hung)
    assert describe.sentence(ended, NOW) == "rank 3 (slot 1) was killed by elasticd, because it hung"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90000, "1 d 1 h"),
        (-5, "0 s"),
    ],
)
def test_a_span_is_told_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert describe.span(seconds) == said


def test_the_last_screen_of_a_failed_job_says_who_how_why_and_where() -> None:
    last = Round(
        4,
        RoundPhase.ENDED,
        (),
        "",
        Cause.WORKER_FAILED,
        NOW,
        outcome=Outcome.FAILED,
        why="budget spent",
        failure=FAILED,
    )
    screen = summary.screen("job", last, restarts=2, lasted_s=75)
    for part in (
        "job failed after 1 min 15 s",
        "budget spent",
        "rank 3",
        "node-b",
        "SIGKILL",
        "ValueError: boom",
        "/logs/3",
    ):
        assert part in screen


def test_a_long_traceback_keeps_its_start_and_its_end() -> None:
    long = Failure("a", Exit(0, 0, 1, NOW, "", "\n".join(f"line {n}" for n in range(5000))))
    last = Round(1, RoundPhase.ENDED, (), "", Cause.START, NOW, outcome=Outcome.FAILED, failure=long)
    screen = summary.screen("job", last, restarts=0, lasted_s=1)
    assert "line 0\n" in screen and "line 4999" in screen and "line 2500" not in screen
    assert len(screen.splitlines()) < 80


def test_the_last_line_of_a_successful_job_is_one_line() -> None:
    last = Round(3, RoundPhase.ENDED, (), "", Cause.START, NOW, outcome=Outcome.SUCCEEDED)
    screen = summary.screen("job", last, restarts=1, lasted_s=10)
    assert len(screen.splitlines()) == 1 and "3 rounds" in screen and "1 restart" in screen


def test_the_last_screen_tells_of_checkpoints_that_came_to_nothing() -> None:
    last = Round(3, RoundPhase.ENDED, (), "", Cause.START, NOW, outcome=Outcome.SUCCEEDED)
    unsaved = "2 checkpoints; the last, of step 9: No space left on device"
    screen = summary.screen("job", last, restarts=0, lasted_s=10, unsaved=unsaved)
    assert screen.splitlines()[-1] == f"Not saved: {unsaved}."


# ---------------------------------------------------------------- the log


@pytest.fixture
def lines() -> Iterator[list[str]]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield []
    log._Context.fields = {}
    structlog.reset_defaults()
    root.handlers[:] = before
    root.setLevel(level)


def test_json_events_of_any_thread_carry_the_bound_fields(lines: list[str]) -> None:
    log.setup("json", line=lines.append)
    log.bind(job="j", node="n")
    thread = threading.Thread(target=lambda: log.reason(log.get(), EXAMPLES[r.RoundFormed], NOW))
    thread.start()
    thread.join()
    told = json.loads(lines[0])
    assert told.pop("timestamp").endswith("Z")
    assert told == {
        "event": "round.formed",
        "level": "info",
        "job": "j",
        "node": "n",
        "round": 7,
        "world_size": 12,
        "nodes": 3,
        "cause": "node_lost",
    }


def test_a_person_reads_sentences_and_a_program_fields(lines: list[str]) -> None:
    failed = Failure("n", Exit(2, 2, -9, NOW))
    reasons = (
        r.RoundClosing(1, Cause.WORKER_FAILED, ("n",), failed),
        r.FailureCharged(failed, 1, 10),
        r.WorkersStarted(2, (0, 1), 2),
    )
    log.setup("console", line=lines.append, colors=False)
    for why in reasons:
        log.reason(log.get(), why, NOW)
    log.get().info("options.noted", sentence="it is so", text="it is so")
    assert [line.split("] ", 1)[1].rstrip() for line in lines] == [
        (
            "rank 2 (slot 2 on n) was killed by SIGKILL (perhaps out of memory: see `dmesg`); "
            "1 of 10 restarts spent"
        ),
        "it is so",
    ]
    lines.clear()
    log.setup("json", line=lines.append)
    for why in reasons:
        log.reason(log.get(), why, NOW)
    told = [json.loads(line) for line in lines]
    assert [line["event"] for line in told] == ["round.closing", "failure.charged", "workers.started"]
    assert not any("sentence" in line for line in told)


def test_a_person_is_not_told_job_and_node_on_every_line(lines: list[str]) -> None:
    log.setup("console", line=lines.append, colors=False)
    log.bind(job="j", node="n")
    log.get().info("agent.started", slots=2)
    log.get().info("round.formed", round=7)
    assert "job=j" in lines[0] and "node=n" in lines[0]
    assert "round=7" in lines[1] and "job=" not in lines[1]


def test_what_others_wrote_does_not_steer_the_terminal_that_the_log_is_on(lines: list[str]) -> None:
    log.setup("console", line=lines.append, colors=False)
    log.get().warning("worker.failed", message="\x1b]0;owned\x07boom\x9b2J", nodes=["\x1b[2Ja"])
    logging.getLogger("lib").warning("of %s", "\x1b[2Jetcd")
    try:
        raise ValueError("\x1b]0;owned\x07cause")
    except ValueError:
        logging.getLogger("lib").exception("failed")
    assert "boom2J" in lines[0] and "'a'" in lines[0] and "of etcd" in lines[1] and "cause" in lines[2]
    assert "Traceback" in lines[2]
    assert not any(c in "".join(lines) for c in "\x1b\x07\x9b")


@pytest.mark.parametrize(
    ("environ", "colored"), [({}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)]
)
def test_a_terminal_gets_colors_unless_it_has_none_or_no_color_is_set(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], colored: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log.setup(line=lines.append)
    log.get().info("round.formed", round=7)
    assert ("\x1b[" in lines[0]) is colored


def test_libraries_that_use_logging_join_in(lines: list[str]) -> None:
    log.setup("json", line=lines.append)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("some.library").exception("it failed with %s", "x")
    told = json.loads(lines[0])
    assert (told["event"], told["level"], told["library"]) == ("it failed with x", "error", "some.library")
    assert "ValueError: boom" in told["exception"]


def test_levels_are_honoured_and_unknown_ones_refused(lines: list[str]) -> None:
    log.setup("json", level="WARNING", line=lines.append)
    log.get().info("quiet.event")
    log.get().warning("loud.event")
    assert [json.loads(line)["event"] for line in lines] == ["loud.event"]
    with pytest.raises(ValueError, match="loudest"):
        log.setup("json", level="loudest")


def test_without_a_terminal_the_log_is_json(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    log.setup()
    log.get().info("some.event")
    assert json.loads(stderr.getvalue())["event"] == "some.event"


# ---------------------------------------------------------------- hangs


def _look(rank: int, place: str, what: str = "") -> Look:
    return Look("b", rank, rank, 50, 7200.0, Doing.WAITING, place, what)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (
            HUNG,
            "rank 3 on node b is in job.py:88, data loading; the other 7 wait for it in all_reduce",
        ),
        (
            Verdict(Why.STOPPED, (_look(1, ""),), 1, "backward", "job.py:9"),
            "rank 1 on node b is stopped (SIGSTOP); the other one waits for it in backward",
        ),
        (
            Verdict(Why.STOPPED, (_look(1, ""),), 2),
            "rank 1 on node b is stopped (SIGSTOP); the other 2 wait for it",
        ),
        (
            Verdict(Why.BUSY, (_look(0, "job.py:5"),), 1, "barrier", "job.py:6"),
            "rank 0 on node b has been busy for 2 h in job.py:5; the other one waits for it in barrier",
        ),
        (
            Verdict(Why.APART, (_look(2, "job.py:9", "barrier"),), 3, "all_reduce", "job.py:7"),
            "rank 2 on node b waits in barrier at job.py:9, but the other 3 wait in all_reduce at job.py:7",
        ),
        (
            Verdict(Why.DEADLOCK, (_look(0, "job.py:9", "barrier"), _look(1, "job.py:7", "backward"))),
            "all 2 ranks wait for each other: rank 0 in barrier at job.py:9; rank 1 in backward at job.py:7",
        ),
        (Verdict(Why.ASLEEP, (_look(0, "job.py:5"),)), "rank 0 on node b is in job.py:5"),
        (
            Verdict(Why.SILENT, (_look(0, ""),), 1, "b", "job.py:6"),
            "rank 0 on node b makes no step, and its stack is unknown; the other one waits for it in b",
        ),
    ],
)
def test_a_hang_is_explained_in_one_line(verdict: Verdict, said: str) -> None:
    assert describe.hang(verdict) == said


def test_of_many_guilty_ranks_only_some_are_listed() -> None:
    said = describe.hang(
        Verdict(Why.ASLEEP, tuple(_look(n, "job.py:5") for n in range(500)), 4, "barrier", "")
    )
    assert "and 497 more ranks likewise" in said and len(said) < 300


def test_workers_that_a_verdict_does_not_name_are_counted() -> None:
    looks = tuple(_look(n, "job.py:9", "barrier") for n in range(4))
    assert "; and 77 more ranks likewise" in describe.hang(Verdict(Why.APART, looks, more=76))
    assert describe.hang(Verdict(Why.DEADLOCK, looks, more=76)).startswith("all 80 ranks wait for each other")


def test_nodes_that_a_reason_does_not_name_are_counted() -> None:
    many = r.AwaitingRelease(tuple("abcdefgh"), more=92)
    assert "waiting for a, b, c, d, e and 95 more to stop" in describe.sentence(many, NOW)
    assert describe.event(many).fields["more"] == 92


def test_the_event_of_a_hang_has_flat_fields() -> None:
    event = describe.event(r.WorkersHung(7, HUNG, "/logs/hang"))
    assert (event.name, event.level) == ("workers.hung", "warning")
    assert event.fields == {
        "round": 7, "why": "asleep", "ranks": [3], "nodes": ["b"], "slots": [1],
        "conclusion": describe.hang(HUNG), "evidence": "/logs/hang",
    }  # fmt: skip


def test_where_no_step_was_seen_nothing_is_called_unproductive() -> None:
    said = describe.spent({"restarting": 300.0, "rendezvous": 20.0, "idle": 100.0})
    assert said == "no step was seen in 5 min 20 s of worker time; of that 20 s forming worlds"
    assert describe.spent({"restarting": 30.0}) == "no step was seen in 30 s of worker time"
    assert describe.spent({"productive": 30.0, "hung": 0.5}) == "98.4 % productive of 30 s of worker time"
    assert describe.spent({"idle": 100.0}) == ""


@pytest.mark.parametrize(
    ("event", "fields", "line"),
    [
        ("worker.entered", {"slot": 0, "round": 2, "step": 4, "state_from": "worker"}, ""),
        (
            "worker.entered",
            {"slot": 0, "round": 2, "step": 4, "batch": 32, "rates_times": 2.0},
            "round 2: the global batch is 32 now, and learning rates are times 2.0",
        ),
        ("worker.done", {"slot": 0, "round": 2}, ""),
        ("zygote.ready", {}, ""),
        ("zygote.left_out", {"module": "pyarrow", "why": "it starts threads"}, ""),
        ("worker.unlinked", {"slot": 3, "why": "it sent no JSON"}, "the worker of slot 3 cannot be told"),
        ("zygote.given_up", {"why": "torch starts threads"}, "workers start without imported modules"),
    ],
)
def test_a_terminal_shows_what_workers_do_only_where_its_reader_cares(
    event: str, fields: dict[str, object], line: str
) -> None:
    shown = describe.worker_line(event, fields)
    assert shown.startswith(line) and bool(shown) == bool(line)
