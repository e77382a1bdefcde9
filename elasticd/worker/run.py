"""The decorator of the run function, which is called again after each change of world."""

from __future__ import annotations

import functools
import logging
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from elasticd.channel.worker_messages import (
    ADDRESS,
    GIVES,
    HANDOVER,
    Broken,
    Done,
    Enter,
    Entered,
    Holds,
    Source,
    Waiting,
)
from elasticd.worker.agent_link.link import Link, own_link
from elasticd.worker.commit.committed import CommittedState
from elasticd.worker.joining.exchange import agree
from elasticd.worker.joining.shard_agreement import agree_on_shards, pass_on
from elasticd.worker.joining.split_agreement import agree_on_parts
from elasticd.worker.splitting.split_state import SplitState
from elasticd.worker.state import State
from elasticd.worker.steps import StepLoop
from elasticd.worker.world.group import World, WorldChanged, is_of_the_group, rehearse, what_led_to

_log = logging.getLogger(__name__)
NEWS_S = 5.0  # how long to wait for Leave after a failed collective
NEWS_S_MAX = 15.0  # the wait of a worker that has no state yet, and then ends
WHY_MAX = 1000  # the most characters of an error to send

P = ParamSpec("P")
T = TypeVar("T")


def run(
    function: Callable[Concatenate[State, P], T] | None = None, *, timeout: timedelta = timedelta(minutes=30)
) -> Callable[Concatenate[State, P], T]:
    """Decorate the function that trains.

    The function is called with a State (and further arguments) in a world that is ready. After each change of
    world it is called again, and continues from ``state.step``. Its return value in the last world is the
    result.

    ``timeout``: of the process group's collectives. An exception of the function's own ends the process as
    usual. A failure because another worker died, left or joined is never raised to the caller. This holds
    even if the function turns the failure into another error, by ``sys.exit()`` in an ``except`` or an error
    in a ``finally``.
    """
    if function is None:
        return functools.partial(run, timeout=timeout)  # type: ignore[return-value]
    train = function
    if not callable(train):
        raise TypeError(f"worker.run decorates the function that trains, and {train!r} is no function")

    @functools.wraps(train)
    def entered(state: State, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(state, State):
            raise TypeError(
                f"the function that trains got an object of the type {type(state).__name__}: give it a "
                "worker.State first, and then its further arguments"
            )
        call = functools.partial(train, state, *args, **kwargs)
        address = os.environ.get(ADDRESS)
        if not address:
            return _run_alone(state._loop, call, timeout)
        if own_link.cache_info().currsize:
            raise RuntimeError(
                "a run function has returned already, which ended this worker's part in the job: train "
                "everything in one run function"
            )
        if dist.is_initialized():
            raise RuntimeError(
                "there is a process group already: elasticd.worker makes one for each world, so leave out "
                "init_process_group()"
            )
        return _run_in_rounds(state._loop, call, own_link(address), timeout)

    return entered


def _run_alone(loop: StepLoop, call: Callable[[], T], timeout: timedelta) -> T:
    """Run in the only world there is: torchrun's, or this process alone."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    state = loop.committed
    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    try:
        _agree(state, World(Enter(1, {**place, "MASTER_ADDR": "", "MASTER_PORT": "0"})))
    except WorldChanged as failed:
        raise failed.__cause__ or failed from None
    state.enter(None)
    batch, rates = state.growth
    if batch and dist.get_rank() == 0:
        _log.info("steps of %d samples; learning rates are multiplied by %g", batch, rates)
    result = call()
    loop.finish()
    return result


def _run_in_rounds(loop: StepLoop, call: Callable[[], T], link: Link, timeout: timedelta) -> T:
    state, round = loop.committed, 0
    if os.environ.get("ELASTICD_ROUND") == "0":  # the worker has no round yet: others may be training
        rehearse(timeout)
    link.send(Waiting(round, state.step, Holds.NONE, memory=state.memory))
    while True:
        enter = link.next_round(round)
        os.environ.update(enter.env)
        handover = os.environ.pop(HANDOVER, "")
        round = enter.round
        world = World(enter)
        link.pass_orders_to(world)
        failure: BaseException | None = None
        try:
            started = time.monotonic()
            world.form(state.commit_number, timeout)
            formed = time.monotonic()
            source = _agree(state, world, handover)
            if handover:
                world.end()  # no worker leaves while another still receives
                raise WorldChanged
            state.enter(world)
            took = formed - started, time.monotonic() - formed
            link.send(Entered(round, state.step, *took, *state.growth, source, *state.shard_sizes))
            result = call()
            world.check()  # raises if the function has swallowed the end of its world, and is not finished
            loop.finish()
            if world.end():
                link.send(Done(round))
                return result
        except WorldChanged as changed:
            failure = changed.__cause__
            _clear_frames(changed)
        except BaseException as error:
            if not _is_of_the_world(error, world):
                _explain(error)
                world.close()  # the other workers notice the failure before this process has ended
                link.send(Broken(round, fails=True, why=_why(error)))
                raise
            failure = error
            _clear_frames(error)
        world.close()
        loop.leave()
        if not handover:
            _await_the_end(state, world, link, failure)
        del failure
        link.send(Waiting(round, state.step, state.holds, state.agreed, state.memory))
        world.forget()


def _agree(state: CommittedState, world: World, handover: str = "") -> Source:
    """Give all workers of the world the same state. Return where the state came from. ``handover``: of a
    handover round, ``GIVES`` or ``TAKES``."""
    if isinstance(state.shards, SplitState):
        return Source.SCRIPT if handover else agree_on_parts(state, state.shards, world)
    if state.shards is not None:
        if handover:
            return pass_on(state, state.shards, world, gives=handover == GIVES)
        return agree_on_shards(state, state.shards, world)
    return agree(state, world)


def _explain(error: BaseException) -> None:
    """Add a remedy to an error that torch does not explain."""
    for led in what_led_to(error):
        if isinstance(led, ValueError) and "Expected more than 1 value per channel when training" in str(led):
            led.add_note(
                "BatchNorm was given a single sample: an epoch's last batch may have only one for a virtual "
                "rank or one of its accumulate pieces; give Data drop_last=True, or a larger global_batch"
            )


def _is_of_the_world(error: BaseException, world: World) -> bool:
    """Whether the function failed because its world ended. Scripts may raise anything after a failed
    collective, for example by ``except Exception: sys.exit(1)``."""
    if isinstance(error, KeyboardInterrupt):
        return False
    ended = world.over or world.broken is not None
    return (ended and isinstance(error, Exception)) or is_of_the_group(error)


def _await_the_end(state: CommittedState, world: World, link: Link, failure: BaseException | None) -> None:
    """Wait until the agent closes the round.

    Raises ``failure`` if the agent sends nothing and this worker has no state to lose. The error then ends
    the worker, and shows the user what is wrong.
    """
    asked = link.wait_for_leave(world.number, NEWS_S if state.agreed else NEWS_S_MAX)
    if asked and (failure is None or link.is_closed(world.number)):
        return
    failure = failure or RuntimeError(f"round {world.number} has ended, and the agent has not closed it")
    if not asked:
        if not state.agreed:
            raise failure
        _log.warning(
            "worker %d lost its peers in round %d (%s), and waits for its agent to close the round",
            world.rank,
            world.number,
            _why(failure),
        )
    # If workers leave the round as planned, other workers may wait for this one.
    link.send(Broken(world.number, fails=False, why=_why(failure)))
    link.wait_for_leave(world.number)


def _clear_frames(failure: BaseException) -> None:
    """Clear the frames of the failure and its causes, which would keep the old world's model, or a DataLoader
    with its processes, alive."""
    for error in what_led_to(failure):
        traceback.clear_frames(error.__traceback__)


def _why(failure: BaseException) -> str:
    return "".join(traceback.format_exception_only(failure)).strip()[:WHY_MAX]
