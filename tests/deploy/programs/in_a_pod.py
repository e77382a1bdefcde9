"""Stands in for an agent that is started as process 1. Does what its argument says, and reports it."""

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
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("ready", os.getpid(), os.getppid(), flush=True)
        signal.sigwait({signal.SIGTERM})
        sys.exit(143)
    case "orphan":
        told, tell = os.pipe()
        if os.fork() == 0:
            if (orphan := os.fork()) == 0:
                os._exit(0)  # a process whose parent does not wait for it
            os.write(tell, str(orphan).encode())
            os._exit(0)
        os.wait()
        orphan = int(os.read(told, 99))
        for _ in range(1000):  # no event tells that a process was reaped
            if not os.path.exists(f"/proc/{orphan}"):
                sys.exit(0)
            select.select([], [], [], 0.02)
        sys.exit(f"{orphan} is still a zombie")
    case "count":
        # The signals are blocked and read: a signal that came just before pause() would not end that pause.
        signals = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        print("ready", flush=True)
        got = 0
        while signal.sigwait(signals) == signal.SIGINT:
            got += 1
            print("got", got, flush=True)
        sys.exit(got)
