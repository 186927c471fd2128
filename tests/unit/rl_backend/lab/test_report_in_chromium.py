"""The report in a real browser: it shows what is below the pointer, and its console stays empty."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_backend.lab.report.page import write_report
from tests.support.page import Element, read_page
from tests.support.runs import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

POINT = """<script>addEventListener("load", () => {
  const chart = document.querySelector(%r), box = chart.getBoundingClientRect();
  const at = {bubbles: true, clientX: box.left + box.width * %s, clientY: box.top + box.height * %s};
  chart.scrollIntoView();
  chart.dispatchEvent(new PointerEvent("pointermove", at));
});</script></body>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chromium")
    sample = {"step": 1, "prompt": "</script><img src=x onerror=console.error(1)>", "response": "b", "reward": 1.0}
    metrics = {"seconds/sample": 2.0, "seconds/train": 3.0}
    write_run(folder, 11, lambda step: metrics | {"reward": step / 10}, [sample])
    return write_report(folder)


def open_page(report: Path, tmp_path: Path, selector: str, x: float, y: float) -> tuple[Element, str]:
    """The page as Chromium has it with the pointer at a share of an element's width and height, and its console."""
    page = tmp_path / "page.html"
    page.write_text(report.read_text().replace("</body>", POINT % (selector, x, y)))
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    page.write_text(done.stdout)
    return read_page(page), "\n".join(re.findall(r".*CONSOLE.*", done.stderr))


@pytest.mark.parametrize(
    ("selector", "x", "y", "shown"),
    [
        ("#chart-reward svg", 0.56, 0.5, "step 6\nReward: 0.6"),
        ("#phases svg", 0.99, 0.5, "step 11\ntrain: 3 s\nsample: 2 s\ntogether: 5 s"),
    ],
)
def test_the_pointer_shows_values(report: Path, tmp_path: Path, selector: str, x: float, y: float, shown: str) -> None:
    page, console = open_page(report, tmp_path, selector, x, y)
    assert page.one("div", id="tip").text == shown
    assert console == ""
