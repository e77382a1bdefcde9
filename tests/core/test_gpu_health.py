"""A GPU's own errors make its slot bad. Errors of the program that ran on the GPU do not."""

from __future__ import annotations

import pytest

from elasticd.core.gpu_health import GpuErrors, GpuHealth, note_errors


def bad(*reports: GpuErrors) -> str | None:
    health = GpuHealth()
    for report in reports:
        health = note_errors(health, 3, report)
    assert health.bad.keys() <= {3}
    return health.bad.get(3)


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([GpuErrors()], None),
        ([GpuErrors(xids=(13, 31, 43, 45))], None),
        ([GpuErrors(xids=(79, 13, 48))], "its driver reports XID 48, 79"),
        ([GpuErrors(lost=True)], "its driver cannot reach it: it is off the bus, or hangs"),
        ([GpuErrors(uncorrected=7)], None),  # the errors came before the agent began
        (
            [GpuErrors(uncorrected=7), GpuErrors(uncorrected=9)],
            "2 of its memory errors could not be corrected",
        ),
        # the driver was loaded again
        ([GpuErrors(uncorrected=7), GpuErrors(), GpuErrors(uncorrected=2)], None),
        ([GpuErrors(xids=(79,)), GpuErrors()], "its driver reports XID 79"),
        ([GpuErrors(xids=(79,)), GpuErrors(lost=True)], "its driver reports XID 79"),
    ],
)
def test_a_slot_is_bad_from_the_first_error_of_its_gpu_on(reports: list[GpuErrors], why: str | None) -> None:
    assert bad(*reports) == why
