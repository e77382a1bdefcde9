import pytest
import torch

from elasticd.worker.commit.finite import all_finite, any_nan

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "finite", "nan"),
    [(1e38, True, False), (INF, False, False), (-INF, False, False), (NAN, False, True)],
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
