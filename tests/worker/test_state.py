"""What a State keeps, and to which values it goes back."""

import contextlib
import enum
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.channel.worker_messages import Enter, Holds
from elasticd.core.age import Age
from elasticd.worker.commit.checkpointing import Parts
from elasticd.worker.values import randomness
from elasticd.worker.values.contents import FrozenParameters
from elasticd.worker.values.plaindata import copied
from elasticd.worker.world.group import World, WorldChanged
from tests.procs.fakecuda import OnGpu
from tests.worker.worlds import entered, in_world

NOWHERE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "0"}


@pytest.fixture
def state() -> worker.State:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = worker.State(model=model, optimizer=optimizer, wrap=None, epoch=0, seen=[])
    entered(made)
    return made


def test_an_abandoned_step_leaves_no_trace(state):
    state.model(torch.randn(8, 4))
    state.commit()
    mean = state.model[1].running_mean.clone()
    drawn = [torch.rand(1).item(), random.random(), np.random.randn(), np.random.randn()]
    state._loop.leave()
    entered(state)

    state.model(torch.randn(8, 4)).sum().backward()
    state.epoch += 1
    state.seen.append(1)
    state.optimizer.param_groups[0]["lr"] = 7.0
    state._loop.leave()

    assert state._committed.holds == Holds.WHOLE and state.step == 1
    assert torch.equal(state.model[1].running_mean, mean)
    assert (state.epoch, state.seen, state.optimizer.param_groups[0]["lr"]) == (0, [], 0.1)
    assert all(p.grad is None for p in state.model.parameters())
    assert [torch.rand(1).item(), random.random(), np.random.randn(), np.random.randn()] == drawn


class Spoiling:
    """A checkpoint that turns out to be damaged after all of it has been read over the State."""

    checkpoints = SimpleNamespace(overwrote=True)

    def __init__(self, ends: type[BaseException] | None) -> None:
        self._ends = ends

    def resume(self, parts: Parts, world: World, *, has_restore: bool, beyond: Age | None) -> None:
        with torch.no_grad():
            for tensor in parts.things["model"].state_dict().values():
                tensor.fill_(9)
        parts.things["optimizer"].state.clear()
        random.seed(99)
        if self._ends is not None:
            raise self._ends


@pytest.mark.parametrize("ends", [None, WorldChanged, OSError])
def test_a_state_outlives_the_reading_of_what_proves_not_to_be_whole(ends):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    made = worker.State(model=model, optimizer=torch.optim.AdamW(model.parameters()), wrap=None, seen=[])
    entered(made)
    made.model(torch.randn(8, 4)).sum().backward()
    made.optimizer.step()
    made.commit()
    made._loop.leave()
    before = copied([model.state_dict(), made.optimizer.state_dict()])
    drawn = random.random()
    made._loop.leave()
    made._committed.saves = Spoiling(ends)
    with pytest.raises(ends) if ends else contextlib.nullcontext():
        assert made._committed.resume(World(Enter(4, NOWHERE)), beyond=Age(1, 1)) == ""
    assert (made._committed.holds, made._committed.agreed, made.step) == (Holds.WHOLE, 1, 1)
    after = [model.state_dict(), made.optimizer.state_dict()]
    assert str(before) == str(after) and random.random() == drawn


def test_what_a_script_begins_with_is_not_gone_on_from_once_something_was_read_over_it():
    model = nn.Linear(4, 4)
    made = worker.State(model=model, optimizer=torch.optim.SGD(model.parameters()), wrap=None)
    made._committed.begin()
    made._committed.saves = Spoiling(WorldChanged)

    with pytest.raises(WorldChanged):
        made._committed.resume(World(Enter(4, NOWHERE)))
    assert made._committed.holds is Holds.TORN


def test_a_normal_number_that_numpy_has_left_over_is_kept_too():
    np.random.seed(1)
    np.random.randn()
    stand = randomness.note()
    first = np.random.randn()
    randomness.resume(stand)
    assert np.random.randn() == first


def test_between_the_optimizers_step_and_the_commit_a_state_is_torn(state):
    state.model(torch.randn(8, 4)).sum().backward()
    assert state._committed.holds == Holds.WHOLE
    state.optimizer.step()
    assert state._committed.holds == Holds.TORN
    state.commit()
    assert state._committed.holds == Holds.WHOLE


def test_a_step_waits_for_its_sums_on_the_gpu_that_the_model_is_on_and_for_no_other(state, monkeypatch):
    asked: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: asked.append(gpu) or stream)
    world = World(Enter(1, NOWHERE))
    entered(state, world)
    state.model(torch.randn(8, 4)).sum().backward()
    state.optimizer.step()
    state.commit()
    assert not asked, "it is on none"

    weight = state._contents.modules["model"][0].weight
    monkeypatch.setattr(weight, "__class__", OnGpu)
    entered(state, world)
    state.model(torch.randn(8, 4)).sum().backward()
    before = weight.detach().clone()
    stream.synchronize = lambda: setattr(world, "over", True)  # what the GPU had waited for is lost
    with pytest.raises(WorldChanged):
        state.optimizer.step()
    assert asked == [weight.device] and torch.equal(weight.detach(), before)
    assert state._committed.holds == Holds.WHOLE


@pytest.mark.parametrize("every", [1, 3, 4])
def test_steps_are_counted_as_they_are_yielded_however_many_a_commit_covers(state, every):
    made = []
    for step in state.steps(12):
        made.append(step)
        if (step + 1) % every == 0:
            state.commit()
        if len(made) == 7:
            break  # as at the end of a world
    assert state.step == 7 // every * every
    state._loop.leave()
    entered(state)
    for step in state.steps(12):
        made.append(step)
        if (step + 1) % every == 0:
            state.commit()
    assert state.step == 12
    assert made[:7] == list(range(7)) and made[7:] == list(range(7 // every * every, 12))


@pytest.mark.parametrize(("until", "said"), [(10, True), (8, False)])
def test_steps_that_are_not_committed_at_the_end_of_the_run_function_are(state, caplog, until, said):
    for step in state.steps(until):
        state.optimizer.step()
        if step % 4 == 3:
            state.commit()
    state._loop.finish()
    assert state.step == until and state._committed.holds is Holds.WHOLE
    assert [r.getMessage()[:50] for r in caplog.records] == [
        "what the script did after committed step 8 is comm"
    ] * said


def test_a_second_commit_in_a_step_is_refused_where_steps_are_numbers(state):
    for step in state.steps(12):
        state.commit()
        if step == 3:
            with pytest.raises(RuntimeError, match="commit.. was called a second time in step 3"):
                state.commit()
            break
    state.commit()
    assert state.step == 5, "outside of steps each commit is one"


def test_gradients_of_micro_batches_are_added_up_with_the_last_and_committed_with_it(tmp_path):
    one, other = in_world(2, tmp_path, accumulated)
    assert one == other == [(4, 4, 1.5), "state.commit() was called before the last micro-batch of step 4"]


def accumulated() -> list[Any]:
    rank = torch.distributed.get_rank()
    model = nn.Linear(1, 1, bias=False)
    state = worker.State(model, torch.optim.SGD(model.parameters(), lr=0.1))
    entered(state)
    synced = 0
    gradient = 0.0
    for micro in state.steps(4, accumulate=3):
        synced += state.model.require_backward_grad_sync
        state.model(torch.full((1, 1), float(rank))).sum().backward()
        if micro.last:
            gradient = float(model.weight.grad)
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.commit()
    result: list[Any] = [(state.step, synced, gradient)]
    for _ in state.steps(5, accumulate=2):
        try:
            state.commit()
        except RuntimeError as error:
            result.append(str(error).partition(",")[0])
        break
    return result


def test_a_generator_is_restored_after_an_abandoned_step_and_sent_to_newcomers():
    model = nn.Linear(1, 1)

    def made(seed: int) -> worker.State:
        new = worker.State(model, wrap=None, noise=torch.Generator().manual_seed(seed))
        entered(new)
        return new

    trained, newcomer = made(1), made(2)
    torch.rand(3, generator=trained.noise)
    trained.commit()
    drawn = torch.rand(3, generator=trained.noise)
    trained._loop.leave()
    newcomer._committed.take(trained._committed.snapshot())
    assert torch.equal(torch.rand(3, generator=trained.noise), drawn)
    assert torch.equal(torch.rand(3, generator=newcomer.noise), drawn)


def test_a_worker_that_has_no_part_of_a_batch_can_unscale_as_the_others_do():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = worker.State(model, optimizer, wrap=None, scaler=scaler)
    entered(state)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.unscale_(optimizer)
    assert model.weight.grad.tolist() == [[2.0**-16] * 4]


def scale_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


LATE: dict[str, tuple[str, Any]] = {
    "a number": ("State's epoch was changed between", lambda state: setattr(state, "epoch", state.epoch + 1)),
    "a list": ("State's seen was changed between", lambda state: state.seen.append(1)),
    "a rate": ("lr of optimizer was changed", lambda state: scale_rate(state.optimizer)),
    "an object": ("State's schedule was changed", lambda state: state.schedule.step()),
}


@pytest.mark.parametrize("what", LATE)
def test_what_is_changed_after_a_commit_is_said_once(caplog, what):
    sentence, change = LATE[what]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    none = torch.tensor([float("nan"), 1.0])  # NaN is not equal to itself
    state = worker.State(model, optimizer, schedule=schedule, wrap=None, epoch=0, seen=[], none=none)
    entered(state)
    for _ in state.steps(4):
        change(state)
        state.commit()
    assert not caplog.records
    for _ in state.steps(9):
        state.commit()
        change(state)
    [said] = caplog.records
    assert sentence in said.getMessage() and "lost whenever the world changes" in said.getMessage()


def test_a_scaler_forgets_a_step_that_was_abandoned():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = worker.State(model, optimizer, wrap=None, scaler=scaler)
    for abandoned in (True, False):
        entered(state)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        if abandoned:
            state._loop.leave()
    scaler.step(optimizer)
    scaler.update()
    state.commit()
    assert state.step == 1


def test_only_what_a_state_was_given_can_be_set(state):
    state.epoch = 3
    assert state.epoch == 3
    with pytest.raises(AttributeError, match="state.epock cannot be set: only plain data given"):
        state.epock = 4
    with pytest.raises(AttributeError, match="nothing named 'epock'"):
        state.epock  # noqa: B018


@pytest.mark.parametrize("name", ["step", "commit", "_kept"])
def test_names_with_a_meaning_of_their_own_are_refused(name):
    with pytest.raises(TypeError, match=f"State uses the name '{name}' itself"):
        worker.State(**{name: 1})


def test_what_cannot_be_sent_to_others_is_refused_at_once():
    with pytest.raises(TypeError, match="State's file holds a"):
        worker.State(file=open(__file__))  # noqa: SIM115


class Colour(enum.Enum):
    RED = 1


def spoil_plain_data(state: worker.State) -> None:
    state.seen.append({Colour.RED: 1})


def spoil_an_optimizer(state: worker.State) -> None:
    state.optimizer.state[next(state.model.parameters())]["odd"] = Colour.RED


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_plain_data, "State holds the key <Colour.RED: 1>, a Colour, which cannot be sent to another "),
        (spoil_an_optimizer, "State's optimizer.state holds a value that cannot be sent to another worker: "),
    ],
)
def test_what_no_other_worker_could_take_is_refused_by_the_first_commit_of_it(state, spoil, sentence):
    state.commit()
    spoil(state)
    with pytest.raises(TypeError, match=sentence):
        state.commit()
    assert state.step == 1


class Growing(nn.Module):
    """A module with a table that is made again if it is too short, and with a cache that exists for a
    while."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)))
        return self.scale * x * self.table[: len(x)]


def test_buffers_that_change_their_shape_are_put_back_and_taken():
    def made() -> worker.State:
        new = worker.State(Growing(), wrap=None)
        entered(new)
        return new

    state, newcomer = made(), made()
    state.model(torch.ones(5))
    state.commit()
    state.model(torch.ones(9))
    state.model.cache = torch.ones(3)
    state._loop.leave()
    assert state.model.table.tolist() == [0, 1, 2, 3, 4] and state.model.cache is None

    newcomer._committed.take(state._committed.snapshot())
    assert newcomer.model.table.tolist() == [0, 1, 2, 3, 4]
    newcomer.model.table += 1
    assert state.model.table.tolist() == [0, 1, 2, 3, 4]

    state.model.cache = torch.ones(3)
    state.commit()
    state.model.cache = None
    state._loop.leave()
    newcomer._committed.take(state._committed.snapshot())
    newcomer.model.cache += 1
    assert state.model.cache.tolist() == [1, 1, 1] and newcomer.model.cache.tolist() == [2, 2, 2]


def test_a_buffer_that_a_module_gets_after_the_state_is_made_is_warned_of_once(caplog):
    state = worker.State(nn.Sequential(nn.Linear(1, 1)), wrap=None)
    entered(state)
    state.commit()
    assert not caplog.records
    state.model[0].register_buffer("seen", torch.zeros(1))
    state.commit()
    state.commit()
    (said,) = caplog.messages
    assert said.startswith("the buffer 0.seen of model was registered after State was made, and is not kept")


def test_a_buffer_that_changes_its_type_is_put_back_in_full():
    state = worker.State(nn.BatchNorm1d(1).half(), wrap=None)
    entered(state)
    for value in (1.0, 2.0, 3.0):  # the copies of older commits are used again
        state.model.running_mean.fill_(value)
        state.commit()
    state.model.float().running_mean.fill_(exact := 1 + 2**-20)
    state.commit()
    state.model.running_mean.zero_()
    state._loop.leave()
    assert state.model.running_mean.item() == exact


def test_an_optimizers_state_of_more_bits_than_its_parameters_arrives_in_full():
    def made() -> worker.State:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        new = worker.State(model, torch.optim.SGD(model.parameters(), momentum=0.9), wrap=None)
        new._committed.begin()
        return new

    trained, newcomer = made(), made()
    for parameter in trained.model.parameters():
        momentum = torch.rand(parameter.shape)
        trained.optimizer.state[parameter] = {"momentum_buffer": momentum, "blocks": [momentum + 1, 2]}
    trained.commit()
    newcomer._committed.take(trained._committed.snapshot())
    pairs = zip(newcomer.model.parameters(), trained.model.parameters(), strict=True)
    for theirs, ours in pairs:
        arrived, sent = newcomer.optimizer.state[theirs], trained.optimizer.state[ours]
        assert torch.equal(arrived["momentum_buffer"], sent["momentum_buffer"])
        assert torch.equal(arrived["blocks"][0], sent["blocks"][0])


def test_an_optimizer_of_parameters_that_a_state_was_not_given_is_refused():
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = {n: torch.optim.SGD(m.parameters()) for n, m in {"one": generator, "two": critic}.items()}
    with pytest.raises(TypeError, match="two changes parameters of no module that State was given"):
        worker.State(generator, **optimizers)
    assert worker.State(generator, critic=critic, **optimizers).critic is critic


def test_a_worker_that_lacks_a_group_of_parameters_fails_and_takes_no_state():
    def made() -> worker.State:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        new = worker.State(model, torch.optim.SGD(model[0].parameters()), wrap=None, epoch=0, seen=[])
        new._committed.begin()
        return new

    trained, newcomer = made(), made()
    trained.optimizer.add_param_group({"params": trained.model[1].parameters()})
    trained.commit()
    before = newcomer.model[0].weight.clone()
    with pytest.raises(RuntimeError, match="optimizer has 1 groups of parameters here, and 2 in the workers"):
        newcomer._committed.take(trained._committed.snapshot())
    assert torch.equal(newcomer.model[0].weight, before)


def test_models_that_cannot_be_kept_or_added_up_are_refused_in_a_sentence(tmp_path):
    *sharded, static = in_world(1, tmp_path, refusals)[0]
    for given, wrapped in (sharded[:2], sharded[2:]):
        assert given.startswith("State cannot keep model, which is sharded already: give State the bare")
        assert wrapped.startswith("wrap= gives the model other parameters, which State cannot keep")
    assert static.startswith("static_graph=True requires that all backward passes are alike")


def refusals() -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def whole() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))

    def flatten(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    def static(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, static_graph=True)

    def said(model: nn.Module, **how: Any) -> str:
        data = worker.Data(list(range(8)), global_batch=4, virtual_ranks=2)
        try:
            state = worker.State(model, data=data, **how)
            entered(state)
        except TypeError as error:
            return str(error)
        return "nothing"

    sharded = [said(model, **wrap) for how in (shard, flatten)
               for model, wrap in ((how(whole()), {}), (whole(), {"wrap": how}))]  # fmt: skip
    return [*sharded, said(whole(), wrap=static)]


ALONE = """
import sys
import torch.distributed, torch.nn.parallel
from elasticd import worker
print(sorted(m for m in sys.modules if m.startswith("elasticd.") and not m.startswith("elasticd.worker")))
model = torch.nn.Linear(2, 1)
state = worker.State(model, torch.optim.SGD(model.parameters()), restore=lambda state: 5)
@worker.run
def train(state, extra):
    return extra, worker.rank(), worker.world_size(), list(state.steps(8)), type(state.model).__name__
print(train(state, "x"))
"""


def test_a_script_without_an_agent_imports_nothing_of_it_and_begins_where_restore_says():
    result = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100)
    imported, returned = result.stdout.splitlines()
    assert returned == "('x', 0, 1, [5, 6, 7], 'DistributedDataParallel')" and result.stderr == ""
    parts = {
        "channel": ("", ".codec", ".framing", ".worker_messages"),
        "checkpoint": (
            "",
            ".client",
            ".client.collectives",
            ".client.levels",
            ".client.objects",
            ".client.packs",
            ".client.tensors",
        ),
        "core": ("", ".age", ".page_layout", ".state_memory"),
        "data": ("", ".auditnotes", ".dealing", ".order", ".summing"),
    }
    assert imported == str([f"elasticd.{package}{m}" for package, modules in parts.items() for m in modules])


def test_parameters_that_an_optimizer_has_in_another_order_are_refused():
    """Otherwise momentum would go to the wrong parameters. Nobody would notice unless their shapes differ."""

    def made(turned: bool) -> worker.State:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        order = list(model.parameters())[::-1] if turned else list(model.parameters())
        return worker.State(model, torch.optim.SGD(order, momentum=0.9))

    one, other, same = made(False), made(True), made(False)
    one._committed.begin()
    with pytest.raises(RuntimeError, match="optimizer has its parameters in another order here"):
        other._committed.take(one._committed.snapshot())
    same._committed.begin()
    same._committed.take(one._committed.snapshot())


def given(**how: Any) -> worker.State:
    model = nn.Linear(2, 2)
    return worker.State(model, torch.optim.SGD(model.parameters(), lr=0.1), **how)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: given(data=[1, 2]), r"data= is of the type list: give a worker.Data\(...\) of it"),
        (lambda: given(redundancy=2), "redundancy= is the number of copies of each shard: give shard="),
        (lambda: given(unit=2), "unit= is the number of workers that hold one model: give shard= or split="),
        (lambda: next(given().steps("10")), "the number of steps is '10': give a whole number"),
        (lambda: next(given().steps(2.5)), "the number of steps is 2.5: give a whole number"),
        (lambda: next(given().steps(3, accumulate=1.5)), "accumulate is 1.5: give a whole number"),
        (lambda: next(given().epochs("3", steps=2)), "the number of epochs is '3': give a whole number"),
        (lambda: next(given().epochs(3, steps="2")), "steps is '2': give a whole number"),
        (lambda: worker.Data([1, 2], global_batch=2.0), "the batch is 2.0: give a whole number"),
        (
            lambda: worker.State(nn.LazyLinear(2)),
            "State's model.weight has no shape yet: call the model once",
        ),
        (lambda: worker.run(5), "worker.run decorates the function that trains, and 5 is no function"),
        (
            lambda: worker.run(lambda state: None)(nn.Linear(2, 2)),
            "the function that trains got an object of the type Linear: give it a worker.State first",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused_in_a_sentence(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()


def test_a_number_of_steps_may_be_one_of_numpy():
    assert [*given().steps(np.int64(2))] == [0, 1]


def half_frozen() -> worker.State:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return entered(worker.State(model=model, optimizer=optimizer, wrap=None))


def test_what_is_frozen_is_committed_and_sent_to_workers_that_join():
    trained, newcomer = half_frozen(), half_frozen()
    trained.model[0].requires_grad_(True)
    trained.model[1].bias.requires_grad_(False)
    trained.commit()
    trained.model[0].weight.requires_grad_(False)
    trained._loop.leave()
    assert [p.requires_grad for p in trained.model.parameters()] == [True, True, True, False]
    newcomer._committed.take(trained._committed.snapshot())
    assert [p.requires_grad for p in newcomer.model.parameters()] == [True, True, True, False]


def test_what_is_unfrozen_between_two_steps_is_no_late_change(caplog):
    state = half_frozen()
    state.commit()
    state.model[0].requires_grad_(True)
    assert state._committed.last.changed(deep=True) == ""


def test_what_a_state_does_not_name_stays_frozen_or_not_as_the_script_has_it():
    named = FrozenParameters({"model": nn.Sequential(nn.Linear(2, 2))})
    model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(2)), "old": nn.Parameter(torch.zeros(2))})
    model["old"].requires_grad_(False)
    model["bytes"] = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    other = FrozenParameters({"model": model})
    other.load_state_dict(named.state_dict())
    assert [model[name].requires_grad for name in ("old", "bytes")] == [False, False] and other.changed == ""
