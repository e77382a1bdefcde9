"""What a worker reports of its training, as its agent reads it."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elasticd import worker
from elasticd.core.page_layout import VALUES_MAX, Fatal, PageContents
from elasticd.procs.page import VARIABLE, Page
from elasticd.worker.agent_link import agentpage
from elasticd.worker.report import all_finite, any_nan, is_news


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """Return the page of this process, as if it were a worker."""
    made = Page(tmp_path / "page")
    os.pwrite(made._fd, struct.pack("=Q", os.getpid()), 16)
    monkeypatch.setenv(VARIABLE, str(made.path))
    agentpage._page_of.cache_clear()
    yield made
    agentpage._page_of.cache_clear()
    made.close()


def test_loss_samples_and_values_by_their_names_reach_the_agent(page: Page) -> None:
    worker.report(loss=torch.tensor(0.5, requires_grad=True), samples=32, accuracy=0.25)
    worker.report(loss=0.25, samples=32, accuracy=torch.tensor(0.75))
    seen = page.contents()
    assert (seen.loss, seen.samples, seen.values) == (0.25, 64, (("accuracy", 0.75),))
    assert seen.pid == os.getpid() and seen.nonfinite == 0


def test_nothing_was_said_where_nothing_was_said(page: Page) -> None:
    assert page.contents() == PageContents(pid=os.getpid())


def test_the_heartbeat_beside_it_is_left_alone(page: Page) -> None:
    before = page.path.read_bytes()[:64]
    for n in range(VALUES_MAX):
        worker.report(**{f"value_{n}": n})
    agentpage.begins_after(7)
    agentpage.committed(8)
    assert page.path.read_bytes()[:64] == before and page.step_times(0) == (0, ())
    assert [v for _, v in page.contents().values] == list(range(VALUES_MAX))
    assert (page.contents().base, page.contents().committed, page.contents().commits) == (7, 8, 1)


def test_a_name_too_many_or_too_long_is_refused(page: Page) -> None:
    with pytest.raises(ValueError, match="at most 40 bytes"):
        worker.report(**{"x" * 41: 1.0})
    for n in range(VALUES_MAX):
        worker.report(**{f"value_{n}": n})
    with pytest.raises(ValueError, match="'more' is one name too many: .* 12 values"):
        worker.report(more=1)


def test_a_step_that_is_not_finite_is_counted_and_no_more_unless_asked(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.report(loss=math.nan)
    worker.report(loss=1.0, norm=math.inf)
    assert page.contents().nonfinite == 2 and page.contents().fatal is None
    monkeypatch.setenv("ELASTICD_ON_NONFINITE", "stop")
    agentpage.committed(4)
    with pytest.raises(worker.NotFinite, match="after step 4: loss is nan; the job stops"):
        worker.report(loss=math.nan)
    assert page.contents().fatal is Fatal.NOT_FINITE


def test_going_back_needs_checkpoints_to_go_back_to(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_ON_NONFINITE", "rollback")
    agentpage.reports_loaded_step(lambda: 30)()
    with pytest.raises(worker.NotFinite, match="going back to the last checkpoint"):
        worker.report(loss=math.nan)
    assert page.contents().fatal is None and page.contents().base == 30 and page.contents().astray == 30
    monkeypatch.setattr(agentpage.own_page(), "has_checkpoints", False)
    with pytest.raises(worker.NotFinite, match="needs a script that loads worker.Checkpoints"):
        worker.report(loss=math.nan)
    assert page.contents().fatal is Fatal.NOT_FINITE


def test_gradients_are_looked_at_before_they_change_anything(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICD_ON_NONFINITE", "stop")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker.State(model=model, optimizer=optimizer)
    before = model.weight.detach().clone()
    model(torch.tensor([[math.inf, 1.0]])).sum().backward()
    with pytest.raises(worker.NotFinite, match="a gradient is NaN or infinite"):
        optimizer.step()
    assert torch.equal(model.weight, before) and page.contents().nonfinite == 1


def test_the_time_that_a_checkpoint_takes_of_the_training_is_counted(page: Page) -> None:
    with agentpage.held_up():
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass
    assert page.contents().held == 1 and page.contents().held_s >= 0.01


def test_a_child_of_the_worker_does_not_speak_for_it(page: Page) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            worker.report(loss=3.0)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert page.contents().loss is None


def test_without_an_agent_it_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    agentpage._page_of.cache_clear()
    worker.report(loss=1.0, samples=1, mine=2.0)
    agentpage._page_of.cache_clear()


@pytest.mark.parametrize(
    ("value", "finite", "nan"),
    [(1e38, True, False), (math.inf, False, False), (-math.inf, False, False), (math.nan, False, True)],
)
def test_one_element_among_many_of_all_kinds_is_found(value: float, finite: bool, nan: bool) -> None:
    odd = torch.zeros(1000, 3)
    odd[777, 1] = value
    tensors = [
        torch.arange(5), torch.tensor(True), torch.zeros(0), torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.complex64), odd,
    ]  # fmt: skip
    assert (all_finite(tensors), any_nan(tensors)) == (finite, nan)


def test_where_there_is_nothing_nothing_is_wrong() -> None:
    assert all_finite([]) and not any_nan([])


def test_a_file_that_is_replaced_again_and_again_is_told_once_a_second() -> None:
    assert all(is_news("a", 5.0) for _ in range(10)), "the first ones are all told"
    calls = [("a", 5.9), ("a", 6.0), ("a", 6.9), ("b", 6.95), ("a", 6.97)]
    assert [is_news(path, now) for path, now in calls] == [False, True, False, True, True]
