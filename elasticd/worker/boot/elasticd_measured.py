"""Runs as the script of plain torchrun for ``elasticd bench scaling``, and becomes the measured script.

The measured script then has the heartbeat of elasticd's own workers, so that both launchers are measured
alike. The arguments of the measured script come by the environment: torchrun would take some of them for its
own.

Standard library only, and self-contained. The caller is elasticd/cli/bench/scaling_runs.py.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # torchrun may be killed
    folder = os.path.dirname(os.environ["ELASTICD_STEP_TIMES"])
    os.environ["ELASTICD_PAGE"] = os.path.join(folder, os.environ["RANK"])
    given = os.environ.get("PYTHONPATH")
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join([here, given] if given else [here])
    words = json.loads(os.environ.pop("ELASTICD_MEASURED"))
    os.execv(sys.executable, [sys.executable, "-u", *words])


if __name__ == "__main__":
    main()
