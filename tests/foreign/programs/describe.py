"""Writes everything that a program can know about its start to FOLDER/RANK.json."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import __main__


def open_files():
    for descriptor in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", descriptor)
        if int(descriptor) > 2 and path.exists():
            yield os.readlink(path)


known = {
    "environment": dict(os.environ),
    "argv": sys.argv,
    "sys.path[0]": sys.path[0],
    "name": __name__,
    "main file": __main__.__file__,
    "main package": __main__.__package__,
    "folder": os.getcwd(),
    "unbuffered": sys.stdout.write_through,
    "leads its session": os.getsid(0) == os.getpid(),
    "handlers": {
        s.name: str(signal.getsignal(s)).split(" at ")[0]
        for s in signal.valid_signals()
        if hasattr(s, "name")
    },
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "umask": os.umask(0o022),
    "nice": os.nice(0),
    "open files": sorted(open_files()),
    "warnings": [str(f[:1]) for f in warnings.filters],
    "torch is there already": "torch" in sys.modules,
    "threads": len(os.listdir("/proc/self/task")),
    "flags": str(sys.flags),
}
Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(known))
