"""Checkpoints of a job: the agent's saver writes them, and commits them in the job's etcd."""

from __future__ import annotations

import os
from pathlib import Path

from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.telemetry import events
from tests import forkserver
from tests.e2e.harness import ELASTICD

PROGRAM = Path(__file__).parent / "programs" / "checkpointed.py"


def test_a_job_goes_on_from_what_its_node_has_in_memory_and_commits_it_all(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTICD_", "TORCHELASTIC_"))}
    environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    command = [ELASTICD, "run", "--standalone", "--nproc-per-node", "2", str(PROGRAM), str(tmp_path)]
    job = forkserver.run(command, env=environment, cwd=tmp_path, timeout_s=280)
    assert job.returncode == 0, job.stderr[-3000:]
    assert '"event": "checkpoint.committed"' in job.stderr and '{"step": 10, ' in job.stderr, (
        "what the saver does is in the agent's log"
    )
    [noted] = (tmp_path / "state").rglob(events.FILE)
    told = events.read([noted.parent])
    assert [e["step"] for e in told if e["event"] == "checkpoint.committed"][-1] == 10
    assert told[-1]["event"] == events.ENDED, "the run is over when its last checkpoint is committed"
    for rank in range(2):
        assert (tmp_path / f"began-{rank}").read_text().splitlines() == ["0 nowhere", "6 memory"]
    assert [s.step for s in FilePointer(tmp_path / "run").read().saved] == [9, 10]
    assert sorted(p.name[5:15] for p in (tmp_path / "run").iterdir() if p.is_dir()) == [
        "0000000009",
        "0000000010",
    ]
