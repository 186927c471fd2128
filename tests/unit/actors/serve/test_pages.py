"""The status page: what it shows of runs, of a server that has none or has keys, and how long it is up."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from actors.serve.pages import shown_seconds
from tests.support.serve_wire import Wire
from tests.support.served import served


def test_the_page_lists_runs_until_the_server_has_keys(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, name="<base>") as found:
        wire = Wire(found.url)

        def page() -> str:
            return httpx.get(f"{found.url}/").text

        assert "None is live" in page() and "<base>" not in page()
        _, run = wire.run("<base>")
        wire.answer(wire.data(run, 1))
        assert "error" in wire.answer(wire.post("optim_step", model_id=run, seq_id=2, adam_params={"eps": -1})).json()
        assert f"<td>{run}<td>&lt;base&gt;<td>2<td>0<td>0" in page() and "failed requests: 1 " in page()
        assert "<tr><td>passes<td>1<tr><td>optimizer steps<td>0" in page()
        found.store.make_key("ann")
        assert run not in page() and "a key sees its own runs alone" in page()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (86400, "1 d 0 h"), (9e6, "104 d 4 h")],
)
def test_seconds_are_shown_in_the_two_largest_units(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown
