"""The size of etcd's database while a large job runs: the job's writes, replayed as fast as etcd takes them.

The writes are those of the agent that leads, and of the other agents in ``tests.bench.scale``. A lease that
is renewed is no write. Each five minutes of the job etcd compacts, as elasticd's etcd and its manifests do:
here the command compacts, since the minutes pass in an instant.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd.core import gathered
from elasticd.core.facts import Fact, RoomProbe, SaverAddress, Summary
from elasticd.core.gathered import KEPT_MAX, PROBE_S, summarize_every_s
from elasticd.core.ports import Delete, Put, Write
from elasticd.etcd import job_keys
from elasticd.etcd._client3 import grpc, rpc
from elasticd.etcd.names import job_prefix
from tests.bench.scale import WORKERS, Leader
from tests.etcd.cluster import EtcdOnPorts

DAY_S = 86_400.0
COMPACT_S = 300.0  # --auto-compaction-retention=5m: twice as much may be kept
AT_ONCE = 120  # writes in a transaction: etcd takes 128
CALL_S = 120.0

Facts = Mapping[str, Fact | None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of the database after a day: of its file, and of the part that is in use. ``most_used``: of
    that part at any time of the day."""

    day: int
    file: int
    used: int
    most_used: int
    writes: int

    def __str__(self) -> str:
        sizes = f"{self.file / 1e6:,.0f} MB, of which {self.used / 1e6:,.0f} MB are in use"
        return f"day {self.day}: {sizes}, {self.most_used / 1e6:,.0f} MB at most; {self.writes:,} writes"


@dataclass(frozen=True, slots=True)
class Story:
    """The requests of the job's events, as etcd gets them. ``probe``: see ``RoomProbe``."""

    start: Sequence[Any]
    summary: Sequence[Any]
    summary_s: float
    probe: Sequence[Any]
    failures: Sequence[Sequence[Any]]  # the lists are used in turn


class EtcdForReplay(EtcdOnPorts):
    """An etcd with the shipped settings, except for two that slow the replay down and do not change the
    database: etcd sleeps for 10 ms after each 1,000 revisions that it has looked at in a compaction, and
    keeps 10,000 transactions in memory, which are large here."""

    def _argv(self) -> list[str]:
        return [*super()._argv(), "--experimental-compaction-batch-limit=10000", "--snapshot-count=2000"]


class Etcd:
    """A client of the server. ``writes``: the keys that were written so far. ``most_used``: the
    most bytes that were in use before a compaction."""

    def __init__(self, endpoint: str, channel: Any) -> None:
        self._metrics = f"http://{endpoint}/metrics"
        self._kv = rpc.KVStub(channel)
        self._kept = self._revision = 0  # the revision of five minutes ago, and the newest
        self.writes = self.most_used = 0

    def apply(self, requests: Sequence[Any]) -> None:
        for request in requests:
            response = self._kv.Txn(request, timeout=CALL_S)  # raises an error if etcd is full
            self._revision = response.header.revision
            self.writes += len(request.success)

    def compact(self) -> None:
        self.most_used = max(self.most_used, self.sizes()[1])
        if self._kept:
            self._kv.Compact(rpc.CompactionRequest(revision=self._kept, physical=True), timeout=CALL_S)
        self._kept = self._revision

    def sizes(self) -> tuple[int, int]:
        """Return the size of the file, and of the part that is in use."""
        with urllib.request.urlopen(self._metrics, timeout=CALL_S) as answer:
            found = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
        kinds = "total_size", "total_size_in_use"
        file, used = (int(float(found[f"etcd_mvcc_db_{kind}_in_bytes"])) for kind in kinds)
        return file, used


def etcd_size(nodes: int, days: int, failures_a_day: float) -> Iterator[Sizes]:
    """Yield the sizes after each day. ``failures_a_day``: of a thousand workers. With every second failure a
    node is lost; with the others all workers of the job fail, and each reports a traceback."""
    story = _story(nodes)
    every_s = DAY_S / (failures_a_day * nodes * WORKERS / 1000)
    with EtcdForReplay() as server, grpc.insecure_channel(server.endpoint) as channel:
        etcd = Etcd(server.endpoint, channel)
        etcd.apply(story.start)
        summary_at, probe_at, failure_at, compact_at, failed = 0.0, PROBE_S, every_s, COMPACT_S, 0
        for day in range(1, days + 1):
            etcd.most_used = 0
            while (at := min(summary_at, probe_at, failure_at, compact_at)) <= day * DAY_S:
                if at == compact_at:
                    etcd.compact()
                    compact_at += COMPACT_S
                elif at == failure_at:
                    etcd.apply(story.failures[failed % len(story.failures)])
                    failed, failure_at = failed + 1, failure_at + every_s
                elif at == summary_at:
                    etcd.apply(story.summary)
                    summary_at, probe_at = at + story.summary_s, at + PROBE_S
                else:
                    etcd.apply(story.probe)
                    probe_at += PROBE_S
            yield Sizes(day, *etcd.sizes(), etcd.most_used, etcd.writes)


def _story(nodes: int) -> Story:
    """Let the real leader form a world and end it twice, and note what is written."""
    leader, written = Leader(nodes), list[Facts]()
    write = leader.etcd._write

    def note(facts: Facts) -> None:
        written.append(dict(facts))
        write(facts)

    leader.etcd._write = note  # type: ignore[method-assign]
    before = {entry.key: entry.fact for entry in leader.etcd._entries.values()}
    leader.form()
    leader.stay_quiet()
    savers = {f"savers/{n}": SaverAddress(n, "10.0.0.1", 29502, "5" * 32) for n in leader.names}
    start = _requests([before, *written, savers])
    summary = _summary(leader)
    written.clear()
    lost = f"nodes/{leader.names[-1]}"
    again = {lost: leader.etcd._entries[lost].fact}
    leader.lose_a_node()
    loss = _requests([*written, again])
    written.clear()
    leader.fail_everywhere()
    failure = _requests(written)
    every_s, probe = summarize_every_s(summary), _requests([{"room": RoomProbe(summary.at)}])
    return Story(start, _requests([{"summary": summary}]), every_s, probe, (loss, failure))


def _summary(leader: Leader) -> Summary:
    """Return a summary with as many lost nodes as it has room for."""
    known = gathered.restore(gathered.Gathered(2), None)
    for member in leader.round.members:
        known = gathered.hear(known, leader.telemetry(member, 1000))
    there = set(leader.names[: 1 - KEPT_MAX])
    return gathered.summarize(known, leader.names[0], there, 1e9)[1]


def _requests(written: Sequence[Facts]) -> list[Any]:
    """Return the transactions of these writes, each with as many as etcd takes at once."""
    requests = []
    for facts in written:
        todo: list[Write] = [Put(k, fact) if fact is not None else Delete(k) for k, fact in facts.items()]
        for at in range(0, len(todo), AT_ONCE):
            some = tuple(todo[at : at + AT_ONCE])
            requests.append(job_keys.transaction(job_prefix("job"), (), some, 0))
    return requests
