"""Epochs with work after their steps: an evaluation, a scheduler, early stopping."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elasticd import worker
from elasticd.worker.agent_link import agentpage
from elasticd.worker.world.group import World
from tests.worker.crew import PATIENCE_S, Crew, outcome_alone
from tests.worker.jobs import NOTHING, Accident, Gate, Journal, begin, outcome, reads
from tests.worker.worlds import entered, in_world

SAMPLES, BATCH, HELD_OUT = 38, 8, 6
STEPS = -(-SAMPLES // BATCH)  # the steps of an epoch
PATIENCE = 2


def sample(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, generator=torch.Generator().manual_seed(i))
    return x, x.sum(0, keepdim=True).sin()


def made(folder: str = "", *, stream: bool = False) -> worker.State:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    samples = [sample(i) for i in range(SAMPLES)]
    dataset = Flow(samples) if stream else samples
    data = worker.Data(dataset, global_batch=BATCH, virtual_ranks=2, consistent=True, epochs=None)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    how: dict[str, Any] = {"checkpoints": str(Path(folder, "run"))} if folder else {}
    how |= {"best": float("inf"), "bad": 0, "seen": [], "drawn": 0.0}
    return worker.State(model, optimizer, data=data, schedule=schedule, **how)


class Flow(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def evaluate(model: nn.Module, accident: Accident, epoch: int) -> float:
    """Evaluate this worker's share of the held-out data. The sum is exact in a world of any size."""
    model.eval()
    losses = torch.zeros(HELD_OUT, dtype=torch.float64)
    with torch.no_grad():
        for i in range(worker.rank(), HELD_OUT, worker.world_size()):
            x, y = sample(1000 + i)
            losses[i] = nn.functional.mse_loss(model(x[None]), y[None])
    accident("evaluating", epoch)
    dist.all_reduce(losses)
    model.train()
    return float(losses.mean())


def train(state: worker.State, journal: Journal, accident: Accident) -> None:
    journal.write(entered=[state.step, worker.world_size()])
    for epoch in state.epochs():
        for step in epoch:
            accident("start", step.number)
            for x, y in step:
                step.backward(nn.functional.mse_loss(state.model(x), y))
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.seen.append(step.number)
            state.commit()
            journal.write(trained=step.number)
            if state._committed.saves is not None:
                state._committed.saves.checkpoints.wait()  # no sample is left out
        loss = evaluate(state.model, accident, epoch.number)
        journal.write(evaluated=epoch.number, step=state.step, rank=worker.rank())
        state.drawn += torch.rand(1).item()
        state.schedule.step(loss)
        state.seen.append(loss)
        state.best, state.bad = min(loss, state.best), 0 if loss < state.best else state.bad + 1
        if state.bad > PATIENCE and worker.rank() == 0:  # rank 0 decides for all
            epoch.stop()
        accident("judged", epoch.number)


def wait_to_be_asked(gate: Gate) -> None:
    """Wait until this worker is asked to leave at the next commit."""
    asked, ask = threading.Event(), World.ask_to_leave

    def told(world: World, going: bool) -> None:
        ask(world, going)
        asked.set()

    World.ask_to_leave = told
    gate.came.write_text("here")
    assert asked.wait(PATIENCE_S)


def work(
    address: str,
    folder: str,
    name: str,
    accident: Accident = NOTHING,
    saver: str = "",
    stream: bool = False,
) -> None:
    journal = begin(address, folder, name, saver)
    state = made(folder if saver else "", stream=stream)
    worker.run(train)(state, journal, accident)
    journal.write(outcome=outcome(state) | {"bad": state.bad, "step": state.step})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    came_to = outcome_alone(work, folder)
    evaluated = reads(folder, "alone", "evaluated")
    assert 5 < len(evaluated) < 60 and evaluated == [*range(len(evaluated))]
    assert came_to["bad"] == PATIENCE + 1 and came_to["rate"] < 0.1, "the schedule and the stop both acted"
    return came_to | {"epochs": len(evaluated)}


def assert_undisturbed(crew: Crew, folder: Path, name: str, undisturbed: dict[str, Any]) -> None:
    errors = (folder / f"{name}.err").read_text()
    assert crew.hands[int(name)].status == 0, errors
    [came_to] = reads(folder, name, "outcome")
    assert [key for key in came_to if came_to[key] != undisturbed[key]] == [], errors


def test_a_worker_lost_in_an_evaluation_has_that_repeated_and_no_step_and_newcomers_repeat_nothing(
    crew, tmp_path, undisturbed
):
    gate = Gate(tmp_path / "gate")
    accidents = [
        Accident("evaluating", 3, partial(wait_to_be_asked, gate)),
        Accident("evaluating", 0),
        Accident("start", STEPS + 2),
        Accident("judged", 2),
        NOTHING,
    ]
    for i, accident in enumerate(accidents):
        crew.start(work, str(tmp_path), str(i), accident)
    crew.all_waiting(*crew.hands)
    crew.hands[4].shunned = True
    crew.form(*crew.hands[:4])
    crew.until(lambda: crew.round == 4)
    gate.until_somebody_waits()
    crew.hands[4].shunned = False
    crew.close(planned=True)  # in the evaluation of epoch 3
    crew.all_ended()
    assert [size for _, size in crew.settled] == [4, 3, 2, 1, 2]
    for name in "04":
        assert_undisturbed(crew, tmp_path, name, undisturbed)
    steps = [step for name in "04" for step in reads(tmp_path, name, "trained")]
    epochs = undisturbed["epochs"]
    assert reads(tmp_path, "0", "trained") == [*range(epochs * STEPS)]
    assert Counter(steps)[4 * STEPS - 1] == 1 and Counter(steps)[4 * STEPS] == 2
    evaluated = Counter(reads(tmp_path, "0", "evaluated"))
    # Worker 0 has finished the evaluation in which worker 3 was lost, or has not.
    assert evaluated.pop(2) in (1, 2) and set(evaluated.values()) == {1} and len(evaluated) == epochs - 1
    assert reads(tmp_path, "4", "entered") == [[4 * STEPS, 2]]
    assert reads(tmp_path, "4", "evaluated") == [*range(4, epochs)]


def test_a_job_started_again_evaluates_the_epoch_that_it_was_killed_in_and_ends_once_it_has_stopped(
    crew, tmp_path, saver, undisturbed
):
    gate = Gate(tmp_path / "gate")
    crew.begin(tmp_path, *[Accident("evaluating", 1, gate.wait)] * 2, job=work, saver=saver)
    gate.until_somebody_waits()
    for hand in crew.hands:
        hand.process.kill()
    crew.until(lambda: all(hand.status is not None for hand in crew.hands))
    for number, accident in ((2, Accident("start", 3 * STEPS + 1)), (3, NOTHING), (4, NOTHING)):
        crew.begin(tmp_path, accident, job=work, first=number, saver=saver)
        crew.all_ended()
    assert crew.hands[2].status == -9
    assert reads(tmp_path, "2", "evaluated") == [1, 2]
    assert reads(tmp_path, "2", "trained") == [*range(2 * STEPS, 3 * STEPS + 1)]
    assert_undisturbed(crew, tmp_path, "3", undisturbed)
    assert reads(tmp_path, "3", "evaluated") == [*range(3, undisturbed["epochs"])]
    assert_undisturbed(
        crew, tmp_path, "4", {**undisturbed, "next": reads(tmp_path, "4", "outcome")[0]["next"]}
    )
    assert reads(tmp_path, "4", "evaluated") == reads(tmp_path, "4", "trained") == []


def counting() -> worker.State:
    return entered(worker.State(nn.Linear(1, 1), wrap=None, seen=[]))


def over(**how: Any) -> worker.State:
    return entered(worker.State(nn.Linear(1, 1), wrap=None, data=worker.Data([*range(9)], **how)))


def use(state: worker.State, step: Any) -> None:
    for batch in step:
        step.backward(state.model(batch[:, None].float()).mean())


def test_epochs_without_data_are_of_so_many_steps_and_go_on_where_they_were_left():
    state = counting()
    made: list[Any] = []
    for _ in range(2):
        for epoch in state.epochs(3, steps=4):
            for step in epoch:
                if (step, len(made)) == (6, 9):
                    break  # as at the end of a world
                made.append(step)
                if step % 3 == 2:
                    state.commit()
            if not epoch.over:
                break
            made.append(f"after {epoch.number} at {state.step}")
            state.seen.append(epoch.number)
        state._loop.leave()
        entered(state)
        made.append("left")
    first = [0, 1, 2, 3, "after 0 at 4", 4, 5, 6, 7]
    assert made[:9] == first and made[9:] == ["after 1 at 8", 8, 9, 10, 11, "after 2 at 12", "left", "left"]
    assert (state.step, state.seen) == (12, [0, 1, 2])


def test_what_comes_after_the_steps_of_an_epoch_is_taken_back_where_the_world_changes_in_it():
    state = counting()
    for epoch in state.epochs(2, steps=2):
        state.model.train()
        for _ in epoch:
            state.commit()
        state.model.eval()
        state.seen.append(epoch.number)
        if epoch.number == 1:
            break
    state._loop.leave()
    entered(state)
    assert (state.seen, state.step, state.model.training) == ([0], 4, True)
    again = [(epoch.number, list(epoch), state.seen.append("again")) for epoch in state.epochs(2, steps=2)]
    assert again == [(1, [], None)] and state.seen == [0, "again"]
    assert list(state.epochs(2, steps=2)) == []


def test_micro_batches_and_commits_now_and_then_fit_into_epochs():
    state = counting()
    for epoch in state.epochs(2, steps=3, accumulate=2):
        turns = [(micro.step, micro.turn) for micro in epoch]
        assert turns == [(3 * epoch.number + n // 2, n % 2) for n in range(6)]
        assert state.step == 3 * epoch.number + 3, "what is not committed is, at the last step"


def test_epochs_may_be_of_so_many_steps_of_the_data_and_the_last_is_shorter():
    state = over(global_batch=2, epochs=2)
    made = []
    for epoch in state.epochs(steps=4):
        for step in epoch:
            use(state, step)
            state.commit()
        made.append((state.step, state.data.committed))
    assert made == [(4, (0, 8)), (8, (1, 6)), (10, (1, 9))]
    assert list(state.epochs(steps=4)) == []


def test_the_end_of_a_streams_epoch_is_found_and_nothing_of_the_next_is_lost():
    state = entered(made(stream=True))
    for epoch in state.epochs(3):
        seen = []
        for step in epoch:
            seen.append((step.epoch, step.position, step.samples))
            for x, y in step:
                step.backward(nn.functional.mse_loss(state.model(x), y))
            if step.position:  # the second commit covers two
                state.commit()
        assert [s for e, _, s in seen if e == epoch.number] == [8, 8, 8, 8, 6] == [s for _, _, s in seen]
        assert state.data.committed == (epoch.number, SAMPLES)


def test_a_training_that_stops_in_the_midst_of_an_epoch_does_not_go_on():
    state = counting()
    for epoch in state.epochs(3, steps=4):
        for step in epoch:
            if step == 6:
                epoch.stop()
                break
            state.commit()
    assert state.step == 6 and list(state.epochs(3, steps=4)) == []


def test_an_epoch_after_other_steps_has_all_of_its_own():
    state = counting()
    assert [len([*epoch]) for epoch in state.epochs(2, steps=2)] == [2, 2]
    for _ in state.steps(10):
        state.commit()
    assert [[*epoch] for epoch in state.epochs(4, steps=4)] == [[10, 11, 12, 13], [14, 15, 16, 17]]


def test_an_epoch_of_the_data_that_other_steps_have_used_up_is_not_made_again():
    state = over(global_batch=3, epochs=4)  # three steps each
    made: list[tuple[int, list[int]]] = []

    def make(until: int | None) -> None:
        for epoch in state.epochs(until):
            made.append((epoch.number, []))
            for step in epoch:
                use(state, step)
                made[-1][1].append(step.number)
                state.commit()

    make(1)
    for step in state.steps(7):
        use(state, step)
        state.commit()
    make(2)
    make(None)
    assert made == [(0, [0, 1, 2]), (2, [7, 8]), (3, [9, 10, 11])]


@pytest.mark.parametrize("every", [1, 2, 3, 99])
def test_samples_are_counted_once_whichever_worker_commits_the_last_step_of_an_epoch(monkeypatch, every):
    used: list[int] = []
    monkeypatch.setattr(agentpage, "samples", used.append)
    state = over(global_batch=2, epochs=2)
    for epoch in state.epochs():
        for i, step in enumerate(epoch):
            use(state, step)
            if i % every == every - 1:
                state.commit()
    assert sum(used) == 2 * 9


def test_samples_of_a_last_step_that_is_committed_at_the_end_are_counted_once(monkeypatch):
    used: list[int] = []
    monkeypatch.setattr(agentpage, "samples", used.append)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = entered(
        worker.State(model, optimizer, wrap=None, data=worker.Data([*range(9)], global_batch=2, epochs=1))
    )
    for step in state.steps():
        use(state, step)
        optimizer.step()
        optimizer.zero_grad()
        if step.number < 3:
            state.commit()
    state._loop.finish()
    assert sum(used) == 9


def leave_early(state: worker.State) -> None:
    for epoch in state.epochs(3, steps=4):
        for _ in epoch:
            break


def leave_and_come_again(state: worker.State) -> None:
    for epoch in state.epochs(3, steps=4):
        for _ in epoch:
            state.commit()
            break
        for _ in epoch:
            state.commit()


def make_epochs_of_steps_and_then_of_the_data(state: worker.State) -> None:
    for epoch in state.epochs(3, steps=2):
        for step in epoch:
            use(state, step)
            state.commit()
    for epoch in state.epochs():
        assert epoch.number == 3, "one without steps, and so on for ever"
        list(epoch)


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (counting, leave_early, RuntimeError, "epoch 0 was left before its end"),
    (counting, leave_and_come_again, RuntimeError, "epoch 0 was left before its end"),
    (counting, lambda state: list(state.epochs(3)), TypeError, "needs steps="),
    (counting, lambda state: list(state.epochs(3, steps=0)), ValueError, "steps is 0"),
    (counting, lambda state: list(state.epochs(3, steps=2, accumulate=0)), ValueError, "accumulate is 0"),
    (lambda: over(global_batch=3), lambda state: list(state.epochs(2)), ValueError, "give Data epochs=2"),
    (
        lambda: over(global_batch=2, epochs=5),
        make_epochs_of_steps_and_then_of_the_data,
        ValueError,
        "3 epochs are over, and the data is in its epoch 1",
    ),
]


@pytest.mark.parametrize(("state", "wrong", "kind", "sentence"), WRONG)
def test_what_cannot_be_meant_is_refused_in_a_sentence(state, wrong, kind, sentence):
    with pytest.raises(kind, match=sentence):
        wrong(state())


def test_a_commit_outside_of_an_epochs_steps_is_needless_and_said_to_be_so_once(caplog):
    state = counting()
    for epoch in state.epochs(2, steps=2):
        for _ in epoch:
            state.commit()
        state.commit()
        assert state.step == 2 + 2 * epoch.number
    state.commit()
    assert state.step == 5, "outside of epochs each commit is one"
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("state.commit() outside of the steps of epoch 0 commits nothing")


def stop_as_ranks_see_it() -> list[int]:
    state = counting()
    made = []
    for epoch in state.epochs(9, steps=1):
        list(epoch)
        made.append(epoch.number)
        if epoch.number >= 2 + 2 * (1 - worker.rank()):  # rank 0 in epoch 4, rank 1 in epoch 2
            epoch.stop()
    return made


def test_whether_to_stop_is_decided_by_rank_0_for_all(tmp_path):
    assert in_world(2, tmp_path, stop_as_ranks_see_it) == [[*range(5)]] * 2
