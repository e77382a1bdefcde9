"""elasticd keeps what scripts rely on under torchrun."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.e2e.harness import Cluster
from tests.ports import free_port

BY_ADDRESS = str(Path(__file__).parent / "programs" / "by_address.py")


def test_ranks_meet_at_the_master_port_in_every_round(cluster: Cluster) -> None:
    """Each round's store has a port of its own, perhaps on another node."""
    cluster.limits = (2, 2)
    port = free_port()
    where = f"--init-method=tcp://localhost:{port}"
    program = [BY_ADDRESS, where, "--fail-first"]
    (a,) = cluster.start("a", options=[f"--master-port={port}"], program=program)
    (b,) = cluster.start("b", program=program)
    assert [a.end(), b.end()] == [0, 0], cluster.state()
    assert cluster.round.number == 2
    assert sorted(line for line in a.out + b.out if "counted" in line) == [
        f"rank {rank} counted 2" for rank in range(2)
    ]


def test_a_taken_master_port_is_reported_and_delays_nothing(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (a,) = cluster.start("a", options=[f"--master-port={port}"])
        cluster.world(1)
        assert a.find("master_port.off", port=port)
        cluster.finishes(a)


def test_agents_of_one_machine_that_were_given_no_name_are_nodes_of_their_own(cluster: Cluster) -> None:
    cluster.limits = (4, 4)
    agents = cluster.start("", "", slots=2)
    cluster.world(4)
    cluster.finishes(*agents)
    names = sorted(agent.find("agent.started")[0]["node"] for agent in agents)
    assert names[1] == f"{names[0]}-2"
