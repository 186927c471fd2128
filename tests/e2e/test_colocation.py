"""Ranks and engines that have memory in turn train as those that have their own; real Ray and vLLM, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.folder.resume import checkpoints_of
from actors.run import RunResult
from examples import grpo
from tests.support.runs import differences, of_the_run

LAST = 4


def lines(run: Path) -> dict[str, list[dict[str, object]]]:
    """Of the first steps, without what the machine decides."""
    found = {name: (run / name).read_text().splitlines() for name in ("metrics.jsonl", "samples.jsonl")}
    return {
        name: [of_the_run(line) for line in map(json.loads, texts) if line["step"] <= LAST] for name, texts in found.items()
    }


@pytest.mark.long
@pytest.mark.shows("loop: with colocate, GRPO has the rewards and samples of a run whose engines never sleep, also resumed")
def test_a_colocated_run_is_the_run_whose_engines_never_sleep(
    learned: tuple[RunResult, Path], ray_cluster: None, tmp_path: Path
) -> None:
    reference = learned[1]
    settings = json.loads((reference / "config.json").read_text())
    settings |= {"run_dir": str(tmp_path / "run"), "trace": False, "colocate": True, "save_every": 2, "resume": "auto"}
    settings["rollout"] = {name: value for name, value in settings["rollout"].items() if name != "sleep_mode"}
    config = grpo.GRPOConfig(**settings)

    class EnoughError(Exception):
        pass

    def stop_after(last: int) -> None:
        def on_step(step: int, metrics: dict[str, float]) -> None:
            if step == last:
                raise EnoughError

        with pytest.raises(EnoughError):
            grpo.train(config, on_step=on_step)

    stop_after(3)
    assert checkpoints_of(config).steps() == [2]
    stop_after(LAST)
    assert differences(lines(tmp_path / "run"), lines(reference)) == []
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["seconds/hand_over"] > 0 for line in found if line["step"])
