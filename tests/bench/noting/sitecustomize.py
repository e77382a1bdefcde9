"""Writes each optimizer step of a worker, whatever its script, to the file named by BENCH_STEPS, as job.py
does. Runs in every process that has this folder on its PYTHONPATH; a worker is a process that has a rank."""

import importlib.util
import os
import sys
import time

_HOOKED = "torch.optim.optimizer"


def _note_steps(optimizers):
    file = os.open(os.environ["BENCH_STEPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    who = f"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.getpid()}"
    made = 0

    def note(*_):
        nonlocal made
        os.write(file, f"{time.monotonic():.6f} {who} {made}\n".encode())
        made += 1

    optimizers.register_optimizer_step_post_hook(note)


class _Finder:
    """Notices the import of torch's optimizers."""

    def find_spec(self, name, path=None, target=None):
        if name != _HOOKED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _note_steps(module)

        spec.loader.exec_module = exec_module
        return spec


if "RANK" in os.environ:
    if _HOOKED in sys.modules:  # the worker was forked from a process that has imported torch
        _note_steps(sys.modules[_HOOKED])
    else:
        sys.meta_path.insert(0, _Finder())
