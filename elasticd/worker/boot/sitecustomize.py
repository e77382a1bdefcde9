"""Runs first in every Python worker, since its folder is the first in the worker's PYTHONPATH.

This module starts the heartbeat, has torch's stores ask again soon for a lost answer, and starts the records
of ``elasticd run --debug``. It removes its folder from PYTHONPATH and sys.path, and its modules from
sys.modules, so that the script and its children see the original environment. Then it imports the
environment's own sitecustomize, which it hides. If the heartbeat fails, the script still runs. In a zygote,
this module first serves requests; the steps above then happen in each forked worker.
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
    except BaseException:  # noqa: BLE001  # the script must not run in this process
        os._exit(1)
    elasticd_zygote.serve(os.path.dirname(os.path.abspath(__file__)), _withdraw)

try:
    import elasticd_heartbeat

    elasticd_heartbeat.start()
    import elasticd_lookups

    elasticd_lookups.ask_again_soon()
    if "ELASTICD_DEBUG_FOLDER" in os.environ:
        import elasticd_debug

        elasticd_debug.start()
except Exception:  # noqa: BLE001, S110  # the script must run in any case
    pass
finally:
    _withdraw(os.path.dirname(os.path.abspath(__file__)))
    for name in (
        "elasticd_heartbeat",
        "elasticd_afterimport",
        "elasticd_lookups",
        "elasticd_mutex",
        "elasticd_recorder",
        "elasticd_steptimes",
        "elasticd_debug",
        "elasticd_records",
        "elasticd_waits",
        "elasticd_ending",
        "elasticd_importing",
        "elasticd_afterfork",
        "elasticd_embryos",
        "elasticd_zygote",
        "sitecustomize",
    ):
        sys.modules.pop(name, None)

import sitecustomize  # noqa: E402, F401  # the next one on the path; site accepts if there is none
