"""Runs first in every Python worker, because this folder leads its PYTHONPATH. Leaves no trace.

It takes this folder off PYTHONPATH and sys.path again, so that the script and its children see the
environment they were given, starts the heartbeat, and hands over to the sitecustomize that would
have run without it. Whatever goes wrong with the heartbeat, the script runs.

In a zygote it stays here until it is a worker, forked, for which all this then happens.
"""

import os
import sys


def _withdraw(here: str) -> None:
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != here]
    if given:
        os.environ["PYTHONPATH"] = os.pathsep.join(given)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)


if "ELASTICD_ZYGOTE" in os.environ:
    try:
        import elasticd_zygote
    except BaseException:  # noqa: BLE001  # the script must not run here
        os._exit(1)
    elasticd_zygote.serve(os.path.dirname(os.path.abspath(__file__)), _withdraw)

try:
    import elasticd_heartbeat

    elasticd_heartbeat.start()
except Exception:  # noqa: BLE001, S110  # the script comes first
    pass
finally:
    _withdraw(os.path.dirname(os.path.abspath(__file__)))
    for name in (
        "elasticd_heartbeat",
        "elasticd_recorder",
        "elasticd_waits",
        "elasticd_gpuclock",
        "elasticd_ending",
        "elasticd_importing",
        "elasticd_likeness",
        "elasticd_zygote",
        "sitecustomize",
    ):
        sys.modules.pop(name, None)

import sitecustomize  # noqa: E402, F401  # the next one on the path; its absence is no error to site
