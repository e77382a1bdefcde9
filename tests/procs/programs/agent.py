"""An agent with a service and some workers, for the tests of sudden deaths.

The argument is JSON: command, workers, fence_s, fork. The program prints a line of JSON for each event.
"""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict

from elasticd.core.ports import Assignment
from elasticd.procs.output import Output
from elasticd.procs.warden_client import Warden
from elasticd.procs.workers import LocalProcs

asked = json.loads(sys.argv[1])


def say(what, **fields):
    os.write(1, (json.dumps({"say": what, **fields}) + "\n").encode())


def on_interrupt(*_):
    say("interrupted")


signal.signal(signal.SIGINT, on_interrupt)
warden = Warden.start()
warden.on_lost(lambda: say("lost"))
folder = tempfile.mkdtemp(dir=asked["folder"])
warden.remove_at_end(folder)
service = warden.spawn_service(["/bin/sleep", "1000"], ended=lambda end: say("service ended", code=end.code))
output = Output()
output.follow_window_size()
procs = LocalProcs(warden, asked["command"], output=output)
if asked.get("fence_s"):
    procs.fence(time.time() + asked["fence_s"])
procs.start(
    1,
    tuple(Assignment(i, i, i, {"RANK": str(i)}) for i in range(asked["workers"])),
    lambda number, exit: say("exited", exit=asdict(exit), at=time.time()),
)
fork = 0
# a child as multiprocessing starts it, which holds all files of this process
if asked.get("fork") and not (fork := os.fork()):
    signal.pause()
say("ready", fork=fork, warden=warden.pid, service=service, paths=[folder, str(procs.page_dir)])
while True:
    time.sleep(0.01)  # if a signal comes just before pause(), its handler runs too late
