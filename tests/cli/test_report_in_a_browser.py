"""The page of ``elasticd report`` in a browser, made from the files of a run."""

from __future__ import annotations

from pathlib import Path

from elasticd.telemetry import runreportpage
from elasticd.telemetry.runreport import run_report
from tests.browser import Browser, needs_chromium
from tests.telemetry.test_runreport import two_rounds


@needs_chromium
def test_the_page_fits_any_window_and_fetches_nothing_and_logs_no_error(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(runreportpage.render(run_report([two_rounds()]), "1.2", 50.0))
    with Browser(tmp_path / "profile") as browser:
        for width, dark in ((400, False), (1280, False), (1280, True)):
            picture = tmp_path / f"report-{width}{'-dark' if dark else ''}.png"
            seen = browser.look(page.as_uri(), width, dark=dark, picture=picture)
            assert seen.title == "train: report"
            assert (seen.inner_px, seen.content_px) == (width, width), "nothing is beside the window"
            assert seen.asked == [page.as_uri()] and not seen.complaints
            for said in ("82.5 %", "a worker failed: rank 1 on a", "forming worlds", "Time of a step"):
                assert said in seen.text
            assert len(picture.read_bytes()) > 20_000
