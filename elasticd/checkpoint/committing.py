"""From memory to a committed checkpoint: shards, then the manifest, then the pointer, each durable
before the next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from elasticd.checkpoint.handover import Memory
from elasticd.checkpoint.manifest import MANIFEST, METADATA, File, digest, encode, parse_folder, shard_name
from elasticd.checkpoint.pace import Pace
from elasticd.checkpoint.store import Store
from elasticd.checkpoint.worlds import Gathering, World
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.retention import Commit, Keep

_OTHERS_S: Final = 600.0  # how long the shards of other nodes may take
_ALONE_S: Final = 30.0  # the same, once our own workers of that world are gone


class Committer(Protocol):
    """Makes a checkpoint that is durable the newest. See ``FilePointer``."""

    def known(self) -> tuple[Checkpoint, bool]:
        """What is committed, and whether this job has committed there. Raises BadCheckpoint, OSError."""

    def witness(self, fence: int) -> bool:
        """Whether it is still that round. Blocks until that is known, or nobody can tell any more."""

    def commit(self, new: Saved, keep: Keep, fence: int, *, in_time: bool = False) -> Commit:
        """``in_time``: it was handed over before the round that came after ``fence`` began."""


class _Receipt(msgspec.Struct, frozen=True):
    """What the savers of other nodes leave beside their shards, or in place of them, for the one that
    commits."""

    file: File | None = None
    why: str = ""


class Committing:
    """``committer_of``: by the store of the checkpoints. All that is here blocks, and is for threads."""

    def __init__(self, committer_of: Callable[[Store], Committer], pace: Pace | None = None) -> None:
        self._committer_of = committer_of
        self._committers: dict[str, Committer] = {}
        self._pace = pace

    def _committer(self, store: Store) -> Committer:
        return self._committers.get(store.url) or self._committers.setdefault(
            store.url, self._committer_of(store)
        )

    def known(self, store: Store) -> tuple[Checkpoint, bool]:
        return self._committer(store).known()

    def open(self, world: World) -> None:
        """What there is to be prepared, before it is waited for."""
        self._committer(world.store).witness(world.fence)

    def witness(self, world: World) -> bool:
        """To be asked when a checkpoint has been handed over: workers that live on when the next
        round has begun can have nothing committed, but what they handed over before it did counts,
        however long it takes to write it and whatever has become of them."""
        return self._committer(world.store).witness(world.fence)

    def write(self, world: World, name: str, rank: int, memory: Memory) -> File:
        """A shard of the checkpoint of that name. Raises OSError."""
        shard = f"{name}/{shard_name(rank)}"
        file = world.store.write(shard, memory.view, self._pace)
        if not world.commits:
            world.store.replace(_receipt(shard), msgspec.json.encode(_Receipt(file)))
        return file

    def commit(self, world: World, gathering: Gathering) -> Saved:
        """Once all shards of this node are written. Raises ``retention.Refused``, BadCheckpoint,
        TimeoutError, OSError; then it is not committed."""
        store, name = world.store, gathering.name
        files = dict(gathering.files)
        for rank in sorted(set(range(world.size)) - files.keys()):
            files[rank] = self._elsewhere(world, gathering, rank)
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
        store.write(f"{name}/{MANIFEST}", memoryview(manifest))
        store.sync(name)
        size = sum(f.size for f in listed) + len(manifest)
        saved = Saved(name, gathering.step, world.round, world.size, gathering.at, size, digest(manifest))
        in_time = gathering.witness is not None and gathering.witness.result()
        made = self._committer(store).commit(saved, world.keep, world.fence, in_time=in_time)
        for old in made.dropped:
            store.remove(old.name)
        self._sweep(world, made, saved)
        return saved

    def refuse(self, world: World, gathering: Gathering) -> None:
        """Tell the one that commits which shards it need not wait for."""
        for rank in world.locals - gathering.files.keys():
            receipt = _receipt(f"{gathering.name}/{shard_name(rank)}")
            with contextlib.suppress(OSError):  # then it waits in vain, for a while
                world.store.replace(receipt, msgspec.json.encode(_Receipt(why=gathering.why)))

    def discard(self, world: World, gathering: Gathering) -> None:
        """What was written of one that came to nothing."""
        world.store.remove(gathering.name)

    def _elsewhere(self, world: World, gathering: Gathering, rank: int) -> File:
        """What another node's saver says of its shard, once it is there."""
        receipt = _receipt(f"{gathering.name}/{shard_name(rank)}")
        alone_since: float | None = None
        while True:
            with contextlib.suppress(FileNotFoundError):
                said = msgspec.json.decode(world.store.read(receipt), type=_Receipt)
                if said.file is None:
                    raise TimeoutError(said.why)
                world.store.remove(receipt)
                return said.file
            now = time.monotonic()
            alone_since = None if world.lines else alone_since or now
            waited_s = _OTHERS_S if alone_since is None else alone_since + _ALONE_S - gathering.began
            if now > gathering.began + waited_s:
                raise TimeoutError(f"the shard of rank {rank}, which is on another node, never came")
            time.sleep(world.store.look_s)

    def _sweep(self, world: World, made: Commit, new: Saved) -> None:
        """Remove what was begun and can never be committed any more."""
        committed = {s.name for s in made.checkpoint.saved}
        for name in world.store.names():
            there = parse_folder(name)
            if there is None or name in committed:
                continue
            # Whoever still writes there would be refused, by the rule of ``retention.commit``.
            if (there.round, there.step) <= (new.round, new.step):
                world.store.remove(name)


def _receipt(shard: str) -> str:
    return f"{shard}.receipt"


def told(error: BaseException) -> str:
    """An error in words, with the file that it is about."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror} ({error.filename})"
    return str(error)
