"""From memory to a committed checkpoint: shards, then the manifest, then the pointer, each durable
before the next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import msgspec

from elasticd.checkpoint.handover import Memory
from elasticd.checkpoint.manifest import MANIFEST, METADATA, BadCheckpoint, File, digest, encode, shard_name
from elasticd.checkpoint.pace import RateLimit
from elasticd.checkpoint.pointer import POINTER, FilePointer
from elasticd.checkpoint.reading import is_finished
from elasticd.checkpoint.store import CheckpointStore, told
from elasticd.checkpoint.worlds import Gathering, SavingWorld
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.naming import parse_folder
from elasticd.core.retention import Commit, CommitRefused, Keep

_RECEIPT: Final = ".receipt"
_READERS: Final = 16
_OTHERS_S: Final = 600.0  # how long the shards of other nodes may take
_ALONE_S: Final = 30.0  # the same, once our own workers of that world are gone


class Committer(Protocol):
    """Makes a checkpoint that is durable the newest. See ``FilePointer``."""

    def known(self, *, own: bool = False) -> Checkpoint:
        """What is committed; ``own``: by this job. Raises BadCheckpoint, OSError."""

    def witness(self, fence: int) -> bool:
        """Whether it is still that round. Blocks until that is known, or nobody can tell any more."""

    def commit(self, new: Saved, keep: Keep, fence: int, *, in_time: bool = False) -> Commit:
        """``in_time``: it was handed over before the round that came after ``fence`` began. Raises
        ``CommitRefused``, BadCheckpoint: it is not committed, nor will it be; OSError: nobody knows."""

    def settle(self) -> Checkpoint:
        """What is committed, once all go by that: for what ``commit`` left unsettled. Raises as that."""

    def close(self) -> None: ...


class _Receipt(msgspec.Struct, frozen=True):
    """What the saver of another node leaves beside its shards, for the one that commits: those it has
    written, by rank, or why they are not to be waited for."""

    files: dict[int, File] = {}
    why: str = ""


_RECEIPTS: Final = msgspec.json.Decoder(_Receipt)


class Committing:
    """``committer_of``: by the store of the checkpoints. All that is here blocks, and is for threads."""

    def __init__(
        self,
        committer_of: Callable[[CheckpointStore], Committer],
        pace: RateLimit | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._committer_of = committer_of
        self._committers: dict[str, Committer] = {}
        self._pace = pace
        self._say = say
        self._begun: set[str] = set()  # stores that have their pointer
        self._unswept: dict[
            str, tuple[CheckpointStore, Commit]
        ] = {}  # where older ones could not be removed yet

    def close(self) -> list[tuple[Saved, str]]:
        """No more are committed. Those that are and that whoever comes later will not know of, and why."""
        untold = self._sweep_again()
        for committer in self._committers.values():
            committer.close()
        return untold

    def _committer(self, store: CheckpointStore) -> Committer:
        return self._committers.get(store.url) or self._committers.setdefault(
            store.url, self._committer_of(store)
        )

    def known(self, store: CheckpointStore, own: bool) -> Checkpoint:
        return self._committer(store).known(own=own)

    def open(self, world: SavingWorld) -> None:
        """What there is to be prepared, before it is waited for."""
        self._committer(world.store).witness(world.fence)

    def witness(self, world: SavingWorld) -> bool:
        """To be asked when a checkpoint has been handed over: workers that live on when the next
        round has begun can have nothing committed, but what they handed over before it did counts,
        however long it takes to write it and whatever has become of them."""
        return self._committer(world.store).witness(world.fence)

    def write(self, world: SavingWorld, name: str, rank: int, memory: Memory) -> File:
        """A shard of the checkpoint of that name. Raises OSError."""
        return world.store.write(f"{name}/{shard_name(rank)}", memory.view, self._pace)

    def hand_in(self, world: SavingWorld, gathering: Gathering) -> None:
        """Tell the one that commits that all shards of this node are written. Raises OSError."""
        world.store.replace(_receipt(world, gathering), msgspec.json.encode(_Receipt(gathering.files)))

    def commit(self, world: SavingWorld, gathering: Gathering) -> Saved:
        """Once all shards of this node are written. Raises ``CommitRefused``, BadCheckpoint,
        TimeoutError, OSError; then it is not committed, but for what ``tried`` says of the gathering."""
        store, name = world.store, gathering.name
        files = gathering.files | self._elsewhere(world, gathering)
        metadata = store.write(f"{name}/{METADATA}", memoryview(gathering.paper.metadata))
        listed = [*(files[rank] for rank in sorted(files)), metadata]
        manifest = encode(
            name,
            gathering.step,
            world.round,
            world.size,
            gathering.at,
            listed,
            gathering.paper.index,
        )
        store.sync(name)
        if store.url not in self._begun:
            FilePointer(store).begin()
            self._begun.add(store.url)
        store.write(f"{name}/{MANIFEST}", memoryview(manifest))
        store.sync(name)
        size = sum(f.size for f in listed) + len(manifest)
        saved = Saved(name, gathering.step, world.round, world.size, gathering.at, size, digest(manifest))
        in_time = gathering.witness is not None and gathering.witness.result()
        committer = self._committer(store)
        gathering.tried = True
        try:
            made = committer.commit(saved, world.keep, world.fence, in_time=in_time)
        except (CommitRefused, BadCheckpoint):
            gathering.tried = False
            raise
        self._sweep(store, made)
        return saved

    def refuse(self, world: SavingWorld, gathering: Gathering) -> None:
        """Tell the one that commits that it need not wait for this node."""
        with contextlib.suppress(OSError):  # then it waits in vain, until a later one is here
            world.store.replace(_receipt(world, gathering), msgspec.json.encode(_Receipt(why=gathering.why)))

    def discard(self, world: SavingWorld, gathering: Gathering) -> None:
        """What was written of one that came to nothing. That may be the room that was wanted before."""
        world.store.remove(gathering.name)
        self._sweep_again()

    def _elsewhere(self, world: SavingWorld, gathering: Gathering) -> dict[int, File]:
        """What other nodes' savers say of their shards, once it is all there. It is found by listing the
        folder and read side by side, as there may be many nodes and the store be far."""
        files: dict[int, File] = {}
        missing = set(range(world.size)) - gathering.files.keys()
        read: set[str] = set()
        alone_since: float | None = None
        while missing:
            later = [g for g in list(world.gatherings.values()) if g.step > gathering.step]
            ahead = {receipt: g.step for g in later for receipt in _receipts(world.store, g.name)}  # first
            there = _receipts(world.store, gathering.name)
            if fresh := sorted(there - read):
                with ThreadPoolExecutor(min(_READERS, len(fresh)), "receipts") as pool:
                    paths = [f"{gathering.name}/{receipt}" for receipt in fresh]
                    for raw in pool.map(world.store.read, paths):
                        said = _RECEIPTS.decode(raw)
                        if said.why:
                            raise TimeoutError(said.why)
                        if any(file.name != shard_name(rank) for rank, file in said.files.items()):
                            raise TimeoutError("what another node says of its shards names other files")
                        files |= said.files
                read |= there
                missing -= files.keys()
                continue
            first = min(missing)
            if lost := ahead.keys() - there:  # each node hands in one after the other
                step = ahead[min(lost)]
                raise TimeoutError(
                    f"the shard of rank {first}, which is on another node, never came, and step {step} has"
                )
            now = time.monotonic()
            alone_since = None if world.lines else alone_since or now
            waited_s = _OTHERS_S if alone_since is None else alone_since + _ALONE_S - gathering.began
            if now > gathering.began + waited_s:
                raise TimeoutError(f"the shard of rank {first}, which is on another node, never came")
            time.sleep(world.store.look_s)
        world.store.unlink(f"{gathering.name}/{receipt}" for receipt in read)
        return files

    def _sweep(self, store: CheckpointStore, made: Commit) -> None:
        """Remove what is kept no longer, and what was begun and can never be committed any more. What is
        finished and came further than the newest stays: whatever is said to be committed, it may be all
        that is left of the work. It is committed whatever fails here, which is for the next time."""
        newest = made.checkpoint.newest
        if newest is None:
            return
        self._unswept[store.url] = (store, made)
        if made.unsettled:
            self._say(f"step {newest.step} is committed, but {POINTER} does not say so yet: {made.unsettled}")
            return
        try:
            names = store.names()
            committed = {s.name for s in made.checkpoint.saved}
            for name in names:
                there = parse_folder(name)
                if there is None or name in committed:
                    continue
                # Whoever still writes there would be refused, by the rule of ``retention.commit``.
                older = (there.round, there.step) <= (newest.round, newest.step)
                if older and (there.step <= newest.step or not is_finished(store, name)):
                    store.remove(name)
            FilePointer(store).clear(names)
        except OSError as error:
            self._say(f"step {newest.step} is committed, and older ones stay for now: {told(error)}")
        else:
            self._unswept.pop(store.url, None)

    def _sweep_again(self) -> list[tuple[Saved, str]]:
        """Where something stopped it before. See ``close``."""
        untold = []
        for store, made in list(self._unswept.values()):
            try:
                known = self._committer(store).settle()
            except (CommitRefused, BadCheckpoint, OSError) as error:
                if made.unsettled and made.checkpoint.newest is not None:
                    untold.append((made.checkpoint.newest, told(error)))
            else:
                self._sweep(store, Commit(known))
        return untold


def _receipt(world: SavingWorld, gathering: Gathering) -> str:
    """Of this node."""
    return f"{gathering.name}/{shard_name(min(world.locals))}{_RECEIPT}"


def _receipts(store: CheckpointStore, folder: str) -> set[str]:
    """The names of those that are there."""
    try:
        return {name for name in store.sizes(folder) if name.endswith(_RECEIPT)}
    except FileNotFoundError:
        return set()
