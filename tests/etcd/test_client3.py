"""elasticd's import of the old etcd3 package is safe in several threads, and disturbs no other package."""

from __future__ import annotations

import subprocess
import sys

_FRESH = """
import os, sys, threading
before = dict(os.environ)
found = []
def load():
    from elasticd.etcd._client3 import rpc
    found.append(rpc.RangeRequest(key=b"k").SerializeToString())
threads = [threading.Thread(target=load) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert found == [b"\\n\\x01k"] * 8, found
assert dict(os.environ) == before, "the environment of workers has changed"
import etcd3
from google.protobuf import descriptor_pool
from google.protobuf.internal import api_implementation
assert api_implementation.Type() != "python", "slow for the whole process"
try:
    descriptor_pool.Default().FindFileByName("rpc.proto")
except KeyError:
    pass
else:
    raise AssertionError("its rpc.proto would collide with others'")
"""


def test_the_client_loads_from_many_threads_and_leaves_the_process_unchanged() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FRESH], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
