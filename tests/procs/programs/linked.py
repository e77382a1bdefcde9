"""A worker that keeps its process from round to round: speaks the protocol of the link, and makes steps while
it is in a round.

The environment variable BEHAVE says how: it ``obeys``; it is ``deaf`` when told to leave; it ``fails`` in its
first round, or is ``alone`` there; it ``never commits``; or it breaks the protocol in some way.
"""

import gc
import mmap
import os
import select
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "faketorch"))
from torch.optim.optimizer import Optimizer

from elasticd.channel.framing import Channel, connect
from elasticd.channel.worker_messages import (
    AGENT_TO_WORKER,
    WORKER_TO_AGENT,
    Broken,
    Done,
    Enter,
    Entered,
    Hello,
    Holds,
    Source,
    Waiting,
)
from elasticd.core import page_layout as layout

with open(os.environ["ELASTICD_PAGE"], "r+b") as file:
    there = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
how = os.environ["BEHAVE"]
optimizer = Optimizer()
link = Channel(connect(os.environ["ELASTICD_LINK"]), WORKER_TO_AGENT, AGENT_TO_WORKER)


def wait(round: int, step: int) -> None:
    link.send(Waiting(round, step, Holds.WHOLE if step else Holds.NONE, round))


def break_the_rules() -> None:
    match how:
        case "garbage":
            link.socket.send(b"\x00\xff}{")
        case "nested":
            link.socket.send(b"[" * 60_000)
        case "endless":
            link.socket.send(b"x" * (1 << 17))
        case "floods":
            while True:
                wait(0, 0)
        case "lies":
            wait(7, 7)
        case "another version":
            link.send(Hello(os.getpid(), v=99))


print("started,", "forked" if gc.get_freeze_count() > 1000 else "afresh", flush=True)
try:
    if how != "another version":
        link.send(Hello(os.getpid()))
    break_the_rules()
    round, step, inside = 0, 0, False
    wait(round, step)
    while True:
        if select.select([link], [], [], 0.003 if inside else None)[0] and how != "never reads":
            message, _ = link.receive()
            if isinstance(message, Enter):
                round, inside = message.round, True
                os.environ.update(message.env)
                print(f"round {round} rank {os.environ.get('RANK')}", flush=True)
                link.send(Entered(round, step, 0.01, 0.02, source=Source.PEER))
            elif inside and how != "deaf":
                inside = False
                wait(round, step)
        if inside:
            optimizer.step()
            step += 1
            if how != "never commits":
                there[layout.COMMITS] += 1
            if how in ("fails", "alone") and step == 1:
                link.send(Broken(round, how == "fails", "the others are gone"))
                if how == "fails":
                    break
            if os.environ.get("FINISH") == str(round):
                link.send(Done(round))
                break
except OSError:
    pass
print("unlinked", flush=True)
if "LINGER" in os.environ:
    open(os.environ["LINGER"]).close()  # a named pipe: wait until the test opens it, too
if os.environ.get("FINISH") is None:
    time.sleep(1000)
