"""The environment of a worker keeps torchrun's contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.core.facts import Member, Round
from elasticd.procs.environment import Setting, assignments, standbys
from tests.core.build import life, round

WORLD = replace(round(7, {"a": 2, "b": 3}, restarts=4), began=1e9, failures=5)
A, B = WORLD.members
PLAIN = Setting("train", restarts_max=10)


def test_a_worker_has_all_that_torchrun_gives_it() -> None:
    last = assignments(WORLD, B, PLAIN)[2]
    assert (last.slot, last.rank, last.local_rank) == (2, 4, 2)
    assert last.env == {
        "RANK": "4",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "4",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "a.example",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "4",
        "TORCHELASTIC_MAX_RESTARTS": "10",
        "TORCHELASTIC_RUN_ID": "train-e8d4a51000",
        "ELASTICD_JOB_NAME": "train",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "ELASTICD_ROUND": "7",
        "ELASTICD_BEGAN": "1000000000",
        "ELASTICD_FAILURES": "5",
        "ELASTICD_SLOT": "2",
    }


def test_a_run_of_a_job_has_another_id_than_the_next_on_all_nodes_and_in_all_rounds() -> None:
    def ids(world: Round) -> set[str]:
        made = [a for m in world.members for a in assignments(world, m, PLAIN)]
        made += standbys((1,), (0, 1), PLAIN, world.began)
        return {a.env["TORCHELASTIC_RUN_ID"] for a in made}

    later = replace(round(9, {"b": 1, "c": 1}), began=WORLD.began)
    next_run = replace(WORLD, began=WORLD.began + 0.5)
    assert len(ids(WORLD)) == 1 and ids(later) == ids(WORLD) and not ids(next_run) & ids(WORLD)
    assert ids(replace(WORLD, began=0.0)) == {"train"}, "written by an older elasticd"


def test_ranks_are_dense_over_the_whole_world_and_local_ranks_over_each_node() -> None:
    made = [a for m in WORLD.members for a in assignments(WORLD, m, PLAIN)]
    assert [a.rank for a in made] == [0, 1, 2, 3, 4]
    assert [a.env["RANK"] for a in made] == ["0", "1", "2", "3", "4"]
    assert [a.env["LOCAL_RANK"] for a in made] == ["0", "1", "0", "1", "2"]


def test_slots_are_names_and_ranks_are_not() -> None:
    member = Member("a", life("a"), (1, 3), 0)
    made = assignments(replace(WORLD, members=(member, B)), member, PLAIN)
    assert [(a.slot, a.local_rank, a.env["ELASTICD_SLOT"]) for a in made] == [(1, 0, "1"), (3, 1, "3")]


@pytest.mark.parametrize(
    ("store", "address"),
    [("10.0.0.1:4000", "10.0.0.1"), ("[fd00::1]:4000", "fd00::1"), ("fd00::1:4000", "fd00::1")],
)
def test_the_store_may_have_any_kind_of_address(store: str, address: str) -> None:
    env = assignments(replace(WORLD, store=store), A, PLAIN)[0].env
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (address, "4000")


# ---------------------------------------------------------------- variables that users set


def test_nccls_error_handling_is_inherited_where_it_is_set() -> None:
    setting = replace(PLAIN, inherited={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert assignments(WORLD, A, setting)[0].env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_variables_for_every_worker_override_all_others() -> None:
    env = assignments(WORLD, A, replace(PLAIN, extra={"HF_HOME": "/data", "OMP_NUM_THREADS": "4"}))[0].env
    assert (env["HF_HOME"], env["OMP_NUM_THREADS"]) == ("/data", "4")


# ---------------------------------------------------------------- GPUs

FOUR = replace(PLAIN, devices=("4", "5", "6", "7"))


def visible(slots: tuple[int, ...], setting: Setting) -> list[str | None]:
    member = Member("a", life("a"), slots, 0)
    made = assignments(replace(WORLD, members=(member,)), member, setting)
    return [a.env.get("CUDA_VISIBLE_DEVICES") for a in made]


def test_where_every_slot_works_the_devices_stay_as_they_are() -> None:
    assert visible((0, 1, 2, 3), FOUR) == [None] * 4
    assert visible((0, 1), FOUR) == [None] * 2, "local ranks still name the right ones"


def test_where_a_slot_is_left_out_local_ranks_still_name_the_right_devices() -> None:
    """Slot 1 is quarantined. The worker of slot 2 has local rank 1, and still its own GPU."""
    assert visible((0, 2, 3), FOUR) == ["4,6,7"] * 3


def test_a_virtual_local_rank_sees_its_own_device_only() -> None:
    setting = replace(FOUR, virtual_local_rank=True)
    assert visible((0, 2), setting) == ["4", "6"]
    member = Member("a", life("a"), (0, 2), 0)
    made = assignments(replace(WORLD, members=(member,)), member, setting)
    assert [a.env["LOCAL_RANK"] for a in made] == ["0", "0"]
    assert [a.local_rank for a in made] == [0, 1], "logs are still told apart"


def test_a_node_without_gpus_says_nothing_about_them() -> None:
    assert visible((1,), PLAIN) == [None]


# ---------------------------------------------------------------- the network
