"""The steps of each save in the saver: write its shards, commit it, and notify the workers. Saves are
committed in their order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.format.manifest import BadCheckpoint, File, shard_name
from elasticd.checkpoint.newest.pointer import POINTER
from elasticd.checkpoint.newest.retention import CommitRefused
from elasticd.checkpoint.protocol import SaveCommitted, SaveFailed, SaverToWorker, SaveWritten
from elasticd.checkpoint.server.background import Background
from elasticd.checkpoint.server.committing import Committing
from elasticd.checkpoint.server.save_report import Fate, SaveReport
from elasticd.checkpoint.server.shards import PendingSave, SavingWorld
from elasticd.checkpoint.shared_memory import Memory
from elasticd.checkpoint.storage import error_text
from elasticd.checkpoint.storage.rate_limit import RateLimit
from elasticd.core.facts import Saved


class SavePipeline:
    """Runs saves until they are committed or have failed. Calls that block run in threads, through ``jobs``;
    all methods must be called in the saver's loop. ``askers``: the threads that ask committers.
    ``lenders``: the thread that makes indexes for workers that resume."""

    def __init__(
        self,
        jobs: Background,
        committing: Committing,
        pace: RateLimit | None,
        report: Callable[[SaveReport], None],
    ) -> None:
        self._jobs = jobs
        self._committing = committing
        self._pace = pace
        self._report = report
        # Few threads: on four busy cores, two threads made training steps 7 % longer, and one thread 4 %.
        self._writers = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4)), "write")
        self._committers = ThreadPoolExecutor(8, "commit")
        self.askers = ThreadPoolExecutor(2, "ask")
        self.lenders = ThreadPoolExecutor(1, "lend")
        self._witnesses = ThreadPoolExecutor(2, "witness")  # may wait for etcd for long

    def close(self) -> None:
        """Finish the calls in progress, and start no more."""
        for pool in (self._writers, self._committers, self.askers, self.lenders):
            pool.shutdown(cancel_futures=True)
        self._witnesses.shutdown(wait=False, cancel_futures=True)  # end with their committers
        for saved, why in self._committing.close():
            said = f"it is committed, but {POINTER} could not be updated: {why}"
            self._report(SaveReport(Fate.FAILED, saved.step, saved.name, why=said))

    def open(self, world: SavingWorld) -> None:
        """Prepare the committer of the world's store, so that the first commit need not wait."""
        if world.commits:
            self._witness(world)

    def _witness(self, world: SavingWorld) -> Future[bool]:
        """Ask whether the world's round is still the job's round. Must be called when a checkpoint is handed
        over: only a checkpoint that was handed over before the next round began may be committed. Its write
        may end later, and its workers may have ended."""
        return self._witnesses.submit(lambda: self._committing.committer(world.store).witness(world.fence))

    def find_or_begin(
        self, world: SavingWorld, name: str, step: int, at: float, layout: Layout
    ) -> PendingSave:
        """Return the checkpoint of that name, and begin it if it is new."""
        if name not in world.pending:
            world.pending[name] = PendingSave(name, step, at, time.monotonic(), layout)
        return world.pending[name]

    def fail_if_ranks_left(self, world: SavingWorld, save: PendingSave) -> None:
        """Fail the checkpoint if a rank has left without handing over its shard."""
        missed = world.left - save.files.keys() - save.writing
        if missed and not save.why:
            save.why = f"rank {min(missed)} left before it had handed over its shard"

    def write(
        self, world: SavingWorld, save: PendingSave, rank: int, memory: Memory, done: Callable[[], None]
    ) -> None:
        """Write the rank's shard. ``done`` is called once its memory is no longer read."""
        save.writing.add(rank)
        if world.commits and save.witness is None:
            save.witness = self._witness(world)

        def written(outcome: File | BaseException) -> None:
            save.writing.discard(rank)
            done()
            if isinstance(outcome, BaseException):
                save.why = save.why or f"the shard of rank {rank} could not be written: {error_text(outcome)}"
            else:
                save.files[rank] = outcome
            self.settle_if_failed(world, save)
            self._advance(world)

        def write() -> File:
            shard = shard_name(rank)
            if not memory.view:  # no file: in a large world, most ranks may have nothing to write
                return File(shard, 0, [])
            return world.store.write(f"{save.name}/{shard}", memory.view, self._pace)

        self._jobs.run(self._writers, write, written)

    def _advance(self, world: SavingWorld) -> None:
        """Commit the oldest checkpoint if its shards are written. The order matters: a commit out of order is
        refused."""
        first = next(iter(world.pending.values()), None)
        if first is None or first.why or first.committing or not world.locals <= first.files.keys():
            return
        first.committing = True
        if not world.commits:

            def handed_in(outcome: BaseException | None) -> None:
                if outcome is None:
                    self._tell(world, SaveWritten(first.name))
                    self._forget(world, first)
                else:
                    first.why = f"the saver that commits could not be notified: {error_text(outcome)}"
                    self.settle_if_failed(world, first)

            self._jobs.run(self._committers, lambda: self._committing.hand_in(world, first), handed_in)
            return
        self._jobs.run(
            self._committers,
            lambda: self._committing.commit(world, first),
            lambda outcome: self._settle(world, first, outcome),
        )

    def _settle(self, world: SavingWorld, save: PendingSave, outcome: Saved | BaseException) -> None:
        if isinstance(outcome, BaseException):
            refused = isinstance(outcome, CommitRefused | BadCheckpoint | TimeoutError)
            save.why = str(outcome) if refused else f"it could not be committed: {error_text(outcome)}"
            self.settle_if_failed(world, save)
            return
        self._forget(world, save)
        took_s = time.monotonic() - save.began
        self._tell(world, SaveCommitted(outcome.name, outcome.step, took_s, outcome.size))
        self._report(SaveReport(Fate.COMMITTED, outcome.step, outcome.name, took_s=took_s, size=outcome.size))

    def settle_if_failed(self, world: SavingWorld, save: PendingSave) -> None:
        """Report a failure once none of the checkpoint's shards is being written. Once every rank of this
        node has handed over or left, advance to the next checkpoint. Remove the failed checkpoint's files,
        unless the checkpoint may be committed in spite of the failure."""
        if not save.why or save.writing:
            return
        if not save.failed:
            save.failed = True
            self._tell(world, SaveFailed(save.name, save.step, save.why))
            if world.commits:
                self._report(SaveReport(Fate.FAILED, save.step, save.name, why=save.why))
            else:
                self._jobs.run(self._writers, lambda: self._committing.refuse(world, save), lambda _: None)
        if not save.settled and world.locals <= save.answered | world.left:
            save.settled = True
            if world.commits and not save.tried:
                self._jobs.run(
                    self._committers,
                    lambda: self._committing.discard(world, save),
                    lambda _: self._forget(world, save),
                )
            else:
                self._forget(world, save)

    def _forget(self, world: SavingWorld, save: PendingSave) -> None:
        world.pending.pop(save.name, None)
        self._advance(world)

    def _tell(self, world: SavingWorld, message: SaverToWorker) -> None:
        for line in world.lines.values():
            line.try_send(message)
