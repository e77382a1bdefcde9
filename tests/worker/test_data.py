"""The data of a training: each sample once, in any sequence of worlds, fetched by torch's DataLoader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import all_reduce
from torch.utils.data import Dataset, IterableDataset, RandomSampler, get_worker_info

from elasticd import worker
from elasticd.core.page_layout import Fatal
from elasticd.worker.data import Data, DataChanged
from elasticd.worker.samples.loading import Share
from tests.worker.worlds import entered, in_world

# virtual rank, samples, and the random numbers that were added to them
Loaded = tuple[int, list[int], list[float]]


class Numbers(Dataset[tuple[int, float]]):
    """Sample i is i, and a random number that its augmentation drew."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(1).item() + random.random() + np.random.rand()


class Flow(IterableDataset[tuple[int, float]]):
    """A stream whose length is known only at its end, and differs from epoch to epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for i in range(self.length + self.epoch):
            yield i, random.random()


class Far(Flow):
    """A stream that refuses to be read from its beginning a second time."""

    def iter_from(self, position: int) -> Iterator[tuple[int, float]]:
        return iter([(i, 0.0) for i in range(position, self.length)])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        raise AssertionError("read from the start")


def load(share: Share) -> list[Loaded]:
    found = []
    for fetched in share.fetch():
        ids, drawn = fetched.values
        assert list(fetched.ids) == ids.tolist()
        found.append((fetched.part.virtual_rank, ids.tolist(), drawn.tolist()))
    return found


def epoch_in(worlds: list[int], state: dict[str, Any] | None = None, **options: Any) -> list[list[Loaded]]:
    """Return the steps of an epoch in which the world changes after each step. Each worker of a world is a
    Data that begins with what the last world has committed. In each world two steps are begun, and one is
    committed."""
    steps = []
    turn = 0
    while True:
        world = worlds[turn % len(worlds)]
        turn += 1
        loaded: list[Loaded] = []
        after: list[dict[str, Any]] = []
        for rank in range(world):
            data = Data(**options)
            if state is not None:
                data.load_state_dict(state)
            shares = data.shares(rank, world)
            share = next(shares, None)
            if share is None:
                continue
            loaded += load(share)
            data.advance(share.batch)
            after.append(data.state_dict())
            ahead = next(shares, None)
            if ahead is not None:
                load(ahead)
        if not after:
            return steps
        assert after == after[:1] * world, "all are at the same place"
        state = after[0]
        steps.append(loaded)


def ids(steps: list[list[Loaded]]) -> list[int]:
    return [i for step in steps for _, samples, _ in step for i in samples]


KINDS: dict[str, dict[str, Any]] = {
    "indexed": {"dataset": Numbers(23), "global_batch": 6, "virtual_ranks": 5, "seed": 3},
    "in pieces": {"dataset": Numbers(23), "global_batch": 6, "virtual_ranks": 2, "accumulate": 3},
    "iterable": {"dataset": Flow(23), "global_batch": 6, "virtual_ranks": 5, "seed": 3},
    "weighted": {"dataset": Numbers(23), "global_batch": 6, "virtual_ranks": 3, "weights": range(23)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_worlds_together_are_one_training(kind):
    """The batches, the samples and the random augmentations are the same in all worlds."""
    alone = epoch_in([1], **KINDS[kind])
    if kind != "weighted":
        assert sorted(ids(alone)) == list(range(23))
    assert epoch_in([2, 3, 5, 1, 7], **KINDS[kind]) == alone
    assert [sum(len(s) for _, s, _ in step) for step in alone] == [6, 6, 6, 5]


@pytest.mark.parametrize("seed", range(30))
def test_for_any_data_and_worlds_batches_are_slices_of_one_order(seed):
    chance = random.Random(seed)
    virtual_ranks, accumulate, drop_last = chance.randint(1, 5), chance.choice([1, 1, 2, 3]), seed % 3 == 0
    batch = virtual_ranks * accumulate + chance.choice([0, 1, 6])
    length = chance.randint(1, 25) + batch * drop_last
    dataset, order = [
        (Numbers(length), {}),
        (Numbers(length), {"shuffle": False}),
        (Numbers(length), {"weights": [chance.random() for _ in range(length)]}),
        (Numbers(length), {"sampler": lambda epoch: [(7 * i + epoch) % length for i in range(length)]}),
        (Flow(length), {}),
    ][seed % 5]
    options = {
        "dataset": dataset,
        "global_batch": batch,
        "virtual_ranks": virtual_ranks,
        "accumulate": accumulate,
        "drop_last": drop_last,
        "epochs": 2,
        "seed": seed,
        **order,
    }
    expected: list[list[int]] = []
    for epoch in range(2):
        one = list(range(length + epoch)) if isinstance(dataset, Flow) else []
        one = one or Data(**options)._order.at(epoch, range(length))
        expected += [one[i : i + batch] for i in range(0, len(one), batch)]
        if drop_last and len(expected[-1]) < batch:
            expected.pop()
    alone = epoch_in([1], **options)
    assert [ids([step]) for step in alone] == expected
    assert epoch_in([chance.randint(1, 6) for _ in range(5)], **options) == alone


@pytest.mark.parametrize("kind", ["indexed", "iterable"])
def test_workers_of_the_dataloader_change_nothing_but_the_speed(kind):
    options = {**KINDS[kind], "dataset": type(KINDS[kind]["dataset"])(8)}
    alone = epoch_in([1], **options)
    assert epoch_in([2, 1], num_workers=2, prefetch_factor=3, **options) == alone


class Dealing(IterableDataset[tuple[int, float]]):
    """A dataset that deals itself out to loading processes, in the ways that torch's documentation shows: in
    ``__iter__``, by its ``worker_init_fn``, or by a number that only this function gets."""

    def __init__(self, how: str) -> None:
        self.how, self.start, self.end, self.by = how, 0, 23, 1

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        if self.how == "in iter" and info is not None:
            return ((i, 0.0) for i in range(self.start + info.id, self.end, info.num_workers))
        return ((i, 0.0) for i in range(self.start, self.end, self.by))

    def init(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        if self.how == "in init":
            each = -(-(info.dataset.end - info.dataset.start) // info.num_workers)
            info.dataset.start += info.id * each
            info.dataset.end = min(info.dataset.end, info.dataset.start + each)
        if self.how == "by number":
            info.dataset.start, info.dataset.by = number, 2


@pytest.mark.parametrize("how", ["in iter", "in init"])
def test_a_stream_that_deals_itself_out_to_loading_processes_is_read_in_full(how):
    options = {"dataset": Dealing(how), "global_batch": 6, "virtual_ranks": 2, "num_workers": 2}
    steps = epoch_in([2, 1], **options, worker_init_fn=options["dataset"].init)
    assert ids(steps) == list(range(23))


def test_a_stream_of_which_loading_processes_read_different_samples_is_refused(monkeypatch):
    said = []
    monkeypatch.setattr("elasticd.worker.agent_link.agentpage.fatal", said.append)
    dataset = Dealing("by number")
    data = Data(dataset, global_batch=6, virtual_ranks=2, num_workers=2, worker_init_fn=dataset.init)
    with pytest.raises(DataChanged, match="two loading processes of a worker read different samples"):
        list(next(data.shares(0, 1)).fetch())
    assert said == [Fatal.BAD_DATA]


class Sharded(IterableDataset[int]):
    """A stream that is sharded by rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(worker.rank(), 40, worker.world_size()))


def read_by_rank(alike: bool) -> str:
    model = nn.Linear(1, 1)
    data = Data(Flow(40) if alike else Sharded(), global_batch=4, virtual_ranks=2)
    state = worker.State(model, torch.optim.SGD(model.parameters(), lr=0.1), data=data)
    entered(state)
    try:
        next(state.steps())
    except DataChanged as error:
        return str(error)
    return ""


def test_a_stream_that_is_sharded_by_rank_is_refused(tmp_path):
    assert in_world(2, tmp_path, read_by_rank, True) == ["", ""]
    for said in in_world(2, tmp_path, read_by_rank, False):
        assert said.startswith("ranks 0 and 1 read different samples at the same position of the dataset")


def contrast(virtual_ranks: int, compares: bool = True) -> str:
    """Train, and return the error. ``compares``: the script calls a collective for each batch."""
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    data = Data(Numbers(32), global_batch=16, virtual_ranks=virtual_ranks)
    state = worker.State(model, torch.optim.SGD(model.parameters(), lr=0.1), data=data)
    entered(state)
    try:
        for step in state.steps():
            for numbers, _ in step:
                mine = state.model(numbers.float()[:, None])
                if compares:
                    all_reduce(mine.detach().mean())
                step.backward(mine.square().mean())
            state.optimizer.step()
            state.commit()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_loss_that_asks_the_others_is_refused_where_they_have_more_batches_or_fewer(tmp_path):
    assert in_world(2, tmp_path, contrast, 4) == [""] * 2
    assert in_world(2, tmp_path, contrast, 3, False) == [""] * 2, "what DDP asks the others is no matter"
    for said in in_world(2, tmp_path, contrast, 3):
        assert said.startswith("the model or its loss calls collectives for each batch")


def test_a_new_world_uses_the_same_processes_to_load():
    data = Data(Numbers(40), global_batch=4, virtual_ranks=2, num_workers=1)
    seen = []
    for world in (1, 2):
        shares = data.shares(0, world)
        for _ in range(2):
            share = next(shares)
            load(share)
            data.advance(share.batch)
        seen.append([p.pid for p in data._loader._iterator._workers])
    assert seen[0] == seen[1]
    del data._loader


def test_loading_draws_no_random_numbers_of_the_trainings():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = [torch.rand(1).item(), random.random(), np.random.rand()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for kind in KINDS.values():
        epoch_in([2], **kind)
    assert [torch.rand(1).item(), random.random(), np.random.rand()] == expected


def test_an_iterable_dataset_that_can_begin_in_the_middle_does():
    data = Data(Far(10), global_batch=4, virtual_ranks=2)
    state = {**data.state_dict(), "position": 8}
    assert ids(epoch_in([2], state, dataset=Far(10), global_batch=4, virtual_ranks=2)) == [8, 9]


def test_a_batch_may_grow_with_the_world():
    steps = epoch_in([1, 2, 3], dataset=Numbers(20), worker_batch=3, rate="none")
    assert [sum(len(s) for _, s, _ in step) for step in steps] == [3, 6, 9, 2]
    assert sorted(ids(steps)) == list(range(20))


def test_virtual_ranks_are_as_many_as_workers_at_most_and_stay_so(monkeypatch):
    monkeypatch.setenv("ELASTICD_WORLD_MAX", "3")
    data = Data(Numbers(20), global_batch=6)
    assert data.facts["virtual_ranks"] == 3
    monkeypatch.setenv("ELASTICD_WORLD_MAX", "5")
    later = Data(Numbers(20), global_batch=6)
    later.load_state_dict(data.state_dict())
    assert later.facts["virtual_ranks"] == 3


class Twice:
    """A sampler with an epoch. Unless it is ``pure``, its order also depends on how often it was asked."""

    def __init__(self, *, pure: bool = True, offset: int = 0) -> None:
        self.epoch, self.pure, self.offset, self.asked = 0, pure, offset, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        turn = self.epoch if self.pure else self.asked
        return iter([(i + turn + self.offset) % 9 for i in range(9)])


@pytest.mark.parametrize("sampler", [Twice(), lambda epoch: [(i + epoch) % 9 for i in range(9)]])
def test_a_sampler_of_ones_own_is_followed(sampler):
    steps = epoch_in([2, 3], dataset=Numbers(9), global_batch=3, virtual_ranks=3, sampler=sampler, epochs=2)
    assert ids(steps) == [*range(9), *range(1, 9), 0]


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no batch": (TypeError, "either global_batch", {"global_batch": None}),
    "two batches": (TypeError, "either global_batch", {"worker_batch": 4}),
    "batch of nothing": (ValueError, "the batch is 0", {"global_batch": 0}),
    "more virtual ranks than samples": (
        ValueError,
        "global_batch is 4, too few for 5 virtual ranks: give a larger one, or fewer virtual_ranks",
        {"virtual_ranks": 5},
    ),
    "more pieces than samples": (
        ValueError,
        "too few for 2 virtual ranks in 3 pieces each",
        {"global_batch": 5, "virtual_ranks": 2, "accumulate": 3},
    ),
    "virtual ranks of nothing": (
        TypeError,
        "leave them out with worker_batch",
        {"global_batch": None, "worker_batch": 4, "virtual_ranks": 2},
    ),
    "a rate that follows nothing": (TypeError, "are for a batch that grows", {"rate": "linear"}),
    "a batch that grows alone": (
        TypeError,
        "choose how the learning rate follows, with rate='linear', 'sqrt', 'none' or a function",
        {"global_batch": None, "worker_batch": 4},
    ),
    "an unknown rule": (
        ValueError,
        "'cubic' is no rule for the learning rate: there are linear, sqrt, none, or a function",
        {"global_batch": None, "worker_batch": 4, "rate": "cubic"},
    ),
    "shuffled by the loader": (TypeError, "Data decides on batch_size itself", {"batch_size": 2}),
    "not a dataset": (TypeError, "a int is no dataset", {"dataset": 3}),
    "empty": (ValueError, "the dataset is empty", {"dataset": Numbers(0)}),
    "never a whole batch": (ValueError, "no whole batch", {"global_batch": 10, "drop_last": True}),
    "two orders": (TypeError, "shuffle and weights both set", {"shuffle": True, "weights": [1] * 9}),
    "weights of others": (ValueError, "8 weights, and the dataset has 9", {"weights": [1] * 8}),
    "draws without weights": (TypeError, "give weights, too", {"draws": 3}),
    "a stream's order": (TypeError, "has an order of its own", {"dataset": Flow(9), "shuffle": True}),
    "a random sampler": (
        ValueError,
        "the sampler gave two orders when asked twice for epoch 0: it must be a function of the epoch alone",
        {"sampler": RandomSampler(range(9))},
    ),
    "a counting sampler": (ValueError, "two orders", {"sampler": Twice(pure=False)}),
    "a sampler of others": (ValueError, "gave index 9, and the dataset has 9", {"sampler": lambda _: [9]}),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_meant_is_refused_in_a_sentence(what):
    kind, sentence, options = BAD[what]
    with pytest.raises(kind, match=sentence) as refused:
        Data(**{"dataset": Numbers(9), "global_batch": 4, **options})
    assert "\n" not in str(refused.value)


CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "another length": ("samples in an epoch: 8 now, and 9 when", {"dataset": Numbers(8)}),
    "another seed": ("the seed: 1 now, and 0 when", {"seed": 1}),
    "another batch": ("global_batch: 3 now, and 4 when", {"global_batch": 3}),
    "other virtual ranks": ("virtual_ranks: 4 now, and 2 when", {"virtual_ranks": 4}),
    "another kind": ("the kind of order: sequential now, and shuffled when", {"shuffle": False}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_training_does_not_go_on_with_other_data(what):
    sentence, options = CHANGED[what]
    before = {"dataset": Numbers(9), "global_batch": 4, "virtual_ranks": 2}
    state = Data(**before).state_dict()
    with pytest.raises(DataChanged, match=sentence) as refused:
        Data(**{**before, **options}).load_state_dict(state)
    assert "\n" not in str(refused.value)


def test_a_training_that_finds_its_data_changed_has_its_job_end(monkeypatch):
    said = []
    monkeypatch.setattr("elasticd.worker.agent_link.agentpage.fatal", said.append)
    state = state_of(Data(Numbers(9), global_batch=4, virtual_ranks=2))
    before = Data(Numbers(8), global_batch=4, virtual_ranks=2).state_dict()
    state._committed.saves = SimpleNamespace(
        resume=lambda *_, **__: state.data.load_state_dict(before),
        checkpoints=SimpleNamespace(overwrote=False),
    )
    with pytest.raises(DataChanged):
        state._committed.resume(None)
    assert said == [Fatal.BAD_DATA]


def test_weights_and_samplers_of_before_are_wanted_too():
    def weighted(last: float) -> Data:
        return Data(Numbers(3), global_batch=1, virtual_ranks=1, weights=[1, 1, last])

    with pytest.raises(DataChanged, match="the weights' digest"):
        weighted(2).load_state_dict(weighted(1).state_dict())

    def listed(offset: int) -> Data:
        return Data(Numbers(9), global_batch=1, virtual_ranks=1, sampler=Twice(offset=offset))

    with pytest.raises(DataChanged, match="the sampler gives another order of epoch 0"):
        listed(1).load_state_dict(listed(0).state_dict())
    listed(1).load_state_dict(listed(1).state_dict())


# ---------------------------------------------------------------- in a State


def state_of(data: Data) -> worker.State:
    model = nn.Linear(1, 1)
    made = worker.State(model, torch.optim.SGD(model.parameters(), lr=0.1), data=data, wrap=None)
    entered(made)
    return made


@pytest.mark.parametrize(
    ("rate", "times"), [("linear", 1.5), ("sqrt", 1.5**0.5), ("none", 1.0), (lambda growth: 7 * growth, 10.5)]
)
def test_rates_follow_a_growing_batch_while_the_optimizer_steps_and_never_show(monkeypatch, rate, times):
    stepped = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            stepped.append([group["lr"] for group in self.param_groups])
            super().step(closure)

    model = nn.Linear(1, 1)
    optimizer = Spy(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    data = Data(Numbers(40), worker_batch=4, rate=rate, rate_batch=8)
    state = worker.State(model, optimizer, data=data, schedule=schedule, wrap=None)
    monkeypatch.setattr("elasticd.worker.commit.committed.world_size", lambda: 3)
    entered(state)
    assert state._committed.growth == (12, pytest.approx(times))
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert stepped == [[pytest.approx(0.5 * times)], [pytest.approx(0.25 * times)]]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_step_that_ends_with_an_error_leaves_the_rate_as_the_script_set_it(monkeypatch):
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError(self.param_groups[0]["lr"])

    model = nn.Linear(1, 1)
    optimizer = Fails(model.parameters(), lr=0.5)
    data = Data(Numbers(40), worker_batch=4, rate="linear", rate_batch=8)
    state = worker.State(model, optimizer, data=data, wrap=None)
    monkeypatch.setattr("elasticd.worker.commit.committed.world_size", lambda: 4)
    entered(state)
    with pytest.raises(RuntimeError, match="1.0"):
        optimizer.step()
    state._loop.leave()
    assert optimizer.param_groups[0]["lr"] == 0.5
    entered(state)
    with pytest.raises(RuntimeError, match="1.0"):
        optimizer.step()


def test_rates_are_right_for_the_first_worlds_batch_by_default():
    data = Data(Numbers(40), worker_batch=4, rate="linear")
    assert data.growth(2) == (8, 1.0)
    later = Data(Numbers(40), worker_batch=4, rate="linear")
    later.load_state_dict(data.state_dict())
    assert later.growth(3) == (12, 1.5)


def test_a_rule_that_gives_no_rate_is_refused():
    data = Data(Numbers(40), worker_batch=4, rate=lambda growth: -growth, rate_batch=4)
    with pytest.raises(ValueError, match="the learning rate gave -2.0 for a batch 2 times as large"):
        data.growth(2)


def loss_of(state: worker.State, batch: Any) -> torch.Tensor:
    return state.model(batch[0].float()[:, None]).square().mean()


def test_the_position_is_committed_with_the_state_and_goes_back_with_it():
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=3))
    used = []
    for step in state.steps():
        used.append([batch[0].tolist() for batch in step if not step.backward(loss_of(state, batch))])
        if step.number == 1:
            state._loop.leave()  # the world ends before the step is committed
            entered(state)
            break
        state.commit()
    for step in state.steps():
        used.append([batch[0].tolist() for batch in step if not step.backward(loss_of(state, batch))])
        state.commit()
    assert used[1] == used[2] and len(used) == 4
    assert sorted(i for step in [used[0], *used[2:]] for part in step for i in part) == list(range(9))
    assert (state.data.epoch, state.data.position, state.step) == (1, 0, 3)
    assert list(state.steps()) == []


def test_a_commit_may_cover_several_batches():
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=1))
    for step in state.steps():
        for batch in step:
            step.backward(loss_of(state, batch))
        if step.position == 3:
            state.commit()
    assert (state.step, state.data.position) == (2, 6)


def test_a_second_commit_in_a_step_of_data_is_one_more_and_takes_no_samples():
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=1))
    for step in state.steps(until=4):
        for batch in step:
            step.backward(loss_of(state, batch))
        state.commit()
        if step.number == 1:
            state.commit()
    assert (state.step, state.data.committed) == (4, (0, 9))


def test_with_the_last_commit_of_an_epoch_the_next_one_begins():
    state = state_of(Data(Numbers(9), global_batch=4, virtual_ranks=1, epochs=3, drop_last=True))
    seen = []
    for step in state.steps():
        for batch in step:
            step.backward(loss_of(state, batch))
        state.commit()
        seen.append((state.data.epoch, state.data.position))
    assert seen == [(0, 4), (1, 0), (1, 4), (2, 0), (2, 4), (3, 0)]


def test_steps_can_be_made_up_to_a_number():
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=1, epochs=None))
    for step in state.steps(until=7):
        for batch in step:
            step.backward(loss_of(state, batch))
        state.commit()
    assert (state.step, state.data.epoch, state.data.position) == (7, 2, 3)


def test_batches_that_are_not_used_or_not_learned_from_are_not_committed():
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=3))
    step = next(state.steps())
    for _ in step:
        break
    with pytest.raises(RuntimeError, match="the batches of step 0 were not all used"):
        state.commit()
    with pytest.raises(RuntimeError, match=r"backward\(loss\) was not called for a batch of step 0"):
        list(next(state.steps()))
    with pytest.raises(RuntimeError, match="can be iterated only once"):
        list(step)
    steps = state.steps()
    next(steps)
    with pytest.raises(RuntimeError, match="the batches of step 0 were not all used"):
        next(steps)


def test_a_loss_that_is_no_mean_is_refused():
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=1))
    step = next(state.steps())
    with pytest.raises(RuntimeError, match="belongs into"):
        step.backward(torch.zeros(1))
    for _ in step:
        with pytest.raises(ValueError, match=r"was given a tensor of shape \(3,\)"):
            step.backward(torch.zeros(3))
        break


def test_steps_without_data_need_a_number():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="needs State"):
        list(worker.State(model).steps())


def test_data_travels_to_newcomers_as_plain_values(tmp_path: Path):
    state = state_of(Data(Numbers(9), global_batch=3, virtual_ranks=3))
    path = tmp_path / "state"
    torch.save(state.data.state_dict(), path)
    assert torch.load(path, weights_only=True) == state.data.state_dict()
