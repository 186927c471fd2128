"""Parts of a run: what is built, connected, and built again on another group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.run.parts import ModelRecipe, Parts
from actors.watch.console import Phases
from tests.support.sampled_runs import Trainer, config_of, inputs_of, without_ray


@pytest.mark.parametrize("rank", [0, 4])
def test_the_models_of_a_lost_group_are_built_on_another_under_the_same_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = config_of(tmp_path, **{"lora.rank": rank} if rank else {})
    session, engines, trainer = without_ray(monkeypatch, config, lambda: inputs_of(config))
    other: Any = Trainer(config)
    with Parts(config, session, Phases(), owner="mine", borrowed=True) as parts:
        policy, reference = parts.build(ModelRecipe("policy")), parts.build(ModelRecipe("reference", forward_only=True))
        held = policy
        parts.connect(policy, "gloo")
        before = parts.push().version
        parts.replace_group(0, other)
        assert policy is held and policy.group is reference.group is other
        assert (policy.base is reference.handle) == bool(rank)
        assert [call[0] for call in other.calls] == (["build", "create"] if rank else ["build", "build"])
        assert other.calls == [call for call in trainer.calls if call[0] != "remove"]
        assert parts.push().version > before
    names = [name for name, _ in engines.syncs]
    policies = [name for name in names if name.endswith("policy")]
    assert len(policies) == 2 and names.count("closed") == len(names) - names.count("closed")
    assert engines.removed == policies * bool(rank)
