"""A worker that keeps its process from round to round: speaks the link, and steps while it is in one.

The environment variable BEHAVE says which: ``obeys``, ``deaf`` to being told to leave, ``fails`` in its first
round or is ``alone`` there, ``never commits``, or how it breaks the rules.
"""

import gc
import json
import mmap
import os
import select
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "faketorch"))
from torch.optim.optimizer import Optimizer

from elasticd.core import page

with open(os.environ["ELASTICD_PAGE"], "r+b") as file:
    there = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
how = os.environ["BEHAVE"]
optimizer = Optimizer()
link = socket.socket(socket.AF_UNIX)
link.connect("\0" + os.environ["ELASTICD_LINK"])


def say(what: str, **fields: object) -> None:
    link.sendall(json.dumps({"is": what, **fields}).encode() + b"\n")


def wait(round: int, step: int) -> None:
    say("waiting", round=round, step=step, state="whole" if step else "none", agreed=round)


def break_the_rules() -> None:
    match how:
        case "garbage":
            link.sendall(b"\x00\xff}{\n")
        case "nested":
            link.sendall(b"[" * 100_000 + b"\n")
        case "endless":
            link.sendall(b"x" * (1 << 22))
        case "floods":
            while True:
                wait(0, 0)
        case "lies":
            wait(7, 7)
        case "another version":
            say("hello", pid=os.getpid(), v=99)


print("started,", "forked" if gc.get_freeze_count() else "afresh", flush=True)
try:
    if how != "another version":
        say("hello", pid=os.getpid(), v=1)
    break_the_rules()
    round, step = 0, 0
    wait(round, step)
    unread, inside = b"", False
    while True:
        if select.select([link], [], [], 0.003 if inside else None)[0] and how != "never reads":
            data = link.recv(1 << 16)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for message in map(json.loads, lines):
                if message["is"] == "enter":
                    round, inside = message["round"], True
                    os.environ.update(message["env"])
                    print(f"round {round} rank {os.environ.get('RANK')}", flush=True)
                    say("entered", round=round, step=step, group_s=0.01, state_s=0.02, source="peer")
                elif inside and how != "deaf":
                    inside = False
                    wait(round, step)
        if inside:
            optimizer.step()
            step += 1
            if how != "never commits":
                there[page.COMMITS] += 1
            if how in ("fails", "alone") and step == 1:
                say("broken", round=round, fails=how == "fails", why="the others are gone")
                if how == "fails":
                    break
            if os.environ.get("FINISH") == str(round):
                say("done", round=round)
                break
except OSError:
    pass
print("unlinked", flush=True)
if "LINGER" in os.environ:
    open(os.environ["LINGER"]).close()  # a fifo: until the test opens it too
if os.environ.get("FINISH") is None:
    time.sleep(1000)
