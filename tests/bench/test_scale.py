"""An event of one node costs the leader as much in a large job as in a small one. An event of all nodes costs
in proportion to the nodes. Counted in operations, so a busy machine changes nothing."""

from __future__ import annotations

from functools import cache

import pytest

from tests.bench.scale import FORMING, OF_ALL_NODES, OF_ONE_NODE, Leader, Missing, _event, play, scale

FEW, MANY = 40, 400


@cache
def operations(nodes: int, kind: str) -> float:
    return _event(kind, _played(nodes).costs[kind].ops)


@cache
def _played(nodes: int) -> Leader:
    return play(nodes, counting=True)


@pytest.mark.parametrize("kind", OF_ONE_NODE)
def test_an_event_of_one_node_costs_as_much_in_a_job_of_ten_times_the_nodes(kind: str) -> None:
    assert operations(MANY, kind) < 1.5 * operations(FEW, kind)


@pytest.mark.parametrize("kind", OF_ALL_NODES)
def test_an_event_of_all_nodes_costs_in_proportion_to_the_nodes(kind: str) -> None:
    assert operations(MANY, kind) < 1.2 * MANY / FEW * operations(FEW, kind)


def test_all_figures_are_printed() -> None:
    lines = scale([25, 30], limit_s=600.0).splitlines()
    assert lines[0].split() == ["8", "workers", "a", "node", "25", "nodes", "30", "nodes"]
    assert len(lines) == 2 + len(OF_ONE_NODE) + len(OF_ALL_NODES) + 3
    assert all(sum(c.isdigit() for c in line) for line in lines[2:])


def test_a_figure_that_does_not_come_in_time_is_an_error() -> None:
    with pytest.raises(Missing, match="was not over in time"):
        scale([25], limit_s=0.0)
    with pytest.raises(Missing, match=f"the cost of {FORMING} is missing"):
        _event(FORMING, [])
