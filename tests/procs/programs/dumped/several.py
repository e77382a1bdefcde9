"""Child processes of all kinds, which must find the script's classes."""

import multiprocessing
import os
import random
import sys

from steps import step_once


class Local:
    def __init__(self, value):
        self.value = value


def double(local):
    return Local(2 * local.value), multiprocessing.current_process().name


def main():
    step_once()
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            ((local, name),) = pool.map(double, [Local(3)])
        print(method, type(local) is Local, local.value, name)
    print("authkey", multiprocessing.current_process().authkey.hex(), file=sys.stderr)
    print("random", random.random(), file=sys.stderr)
    print("os", os.urandom(4).hex(), file=sys.stderr)


if __name__ == "__main__":
    main()
