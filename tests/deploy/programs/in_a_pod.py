"""Stands for an agent that is started as process 1. Does what its argument says, and tells of it."""

import os
import select
import signal
import sys

from elasticd.procs.init import fork_from_process_1

fork_from_process_1()
match sys.argv[1]:
    case "exit":
        sys.exit(int(sys.argv[2]))
    case "die":
        os.kill(os.getpid(), signal.SIGKILL)
    case "heed":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        print("ready", os.getpid(), os.getppid(), flush=True)
        signal.pause()
    case "orphan":
        told, tell = os.pipe()
        if os.fork() == 0:
            if (orphan := os.fork()) == 0:
                os._exit(0)  # nobody of its own waits for it
            os.write(tell, str(orphan).encode())
            os._exit(0)
        os.wait()
        orphan = int(os.read(told, 99))
        for _ in range(1000):  # nothing tells that a process was reaped
            if not os.path.exists(f"/proc/{orphan}"):
                sys.exit(0)
            select.select([], [], [], 0.02)
        sys.exit(f"{orphan} is still a zombie")
    case "count":
        got: list[int] = []

        def count(*_: object) -> None:
            got.append(1)
            os.write(1, b"got %d\n" % len(got))  # here: one that comes before the pause ends no pause

        signal.signal(signal.SIGINT, count)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(got)))
        print("ready", flush=True)
        while True:
            signal.pause()
