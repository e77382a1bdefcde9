"""The state of a waiting worker."""

from elasticd.channel.worker_messages import Holds, Waiting
from elasticd.core.age import Age


def test_only_a_whole_state_is_one_to_bring() -> None:
    assert Waiting(4, 7, Holds.WHOLE, 3).age == Age(3, 7)
    assert Waiting(4, 7, Holds.TORN, 3).age is None
    assert Waiting(0, 0, Holds.NONE).age is None
