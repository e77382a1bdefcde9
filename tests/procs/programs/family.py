"""A worker with descendants of every kind. Once all are there, prints their pids as JSON, and waits.

Arguments choose the kinds: child, group (a process group of its own, and no environment), setsid (a session
of its own), daemon (forked twice), forgetful (a daemon without environment). With "ignore" the worker ignores
signals.
"""

import json
import os
import signal
import subprocess
import sys

KINDS = sys.argv[1].split(",") if len(sys.argv) > 1 else ["child", "setsid", "daemon", "forgetful"]

START_AND_LEAVE = """
import json, os, subprocess, sys
env = json.loads(sys.argv[1])
sleep = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, stdout=2, env=env)
print(sleep.pid, flush=True)
os._exit(0)
"""


def daemon(env):
    done = subprocess.run(
        [sys.executable, "-c", START_AND_LEAVE, json.dumps(env)], stdout=subprocess.PIPE, check=True
    )
    return int(done.stdout)


pids = {"worker": os.getpid()}
for kind in KINDS:
    if kind == "ignore":
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    elif kind == "group":
        pids[kind] = subprocess.Popen(["/bin/sleep", "1000"], process_group=0, env={}).pid
    elif kind in ("child", "setsid"):
        pids[kind] = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=kind == "setsid").pid
    else:
        pids[kind] = daemon({} if kind == "forgetful" else dict(os.environ))
print("family", json.dumps(pids), flush=True)
if os.environ.get("THEN") == "exit":
    os._exit(3)
signal.pause()
