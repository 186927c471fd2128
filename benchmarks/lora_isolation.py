"""Trials of isolation: a watched LoRA tenant alone and beside others that do something, in every layout, byte by byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.bridge_state import write_tiny_mixture
from tests.support.models import write_tiny_qwen3
from tests.support.rank_pool import RankPool
from tests.support.tenant_events import EVENTS, OPENS, STEPS, WATCHED, watched_state

SEEDS = (0, 1)
TIMEOUT_SECONDS = 400.0


class Layout(NamedTuple):
    """Where trials are made.

    Attributes:
        model: ``dense`` or ``mixture``.
        world_size: ranks.
        settings: of the runtime's configuration.
    """

    model: str
    backend: str
    name: str
    world_size: int
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.model}, {self.backend}, {self.name}"


def _parallel(**sizes: int) -> dict[str, Any]:
    return {"parallel": sizes}


LAYOUTS = (
    Layout("dense", "native", "one rank", 1, {}),
    Layout("dense", "native", "dp2", 2, {}),
    Layout("dense", "native", "dp2 recomputed", 2, {"activation_checkpointing": "full"}),
    Layout("dense", "native", "tp2", 2, _parallel(tp=2)),
    Layout("dense", "native", "cp2", 2, _parallel(cp=2)),
    Layout("dense", "native", "pp2", 2, _parallel(pp=2)),
    Layout("dense", "native", "pp2 zbv", 2, {**_parallel(pp=2, vpp=2), "pipeline_schedule": "zbv"}),
    Layout("dense", "native", "dp2 tp2", 4, _parallel(tp=2)),
    Layout("dense", "bridge", "one rank", 1, {}),
    Layout("dense", "bridge", "dp2", 2, {}),
    Layout("dense", "bridge", "tp2", 2, _parallel(tp=2)),
    Layout("dense", "bridge", "pp2", 2, _parallel(pp=2)),
    Layout("mixture", "native", "one rank", 1, {}),
    Layout("mixture", "native", "dp2", 2, {}),
    Layout("mixture", "native", "ep2", 2, _parallel(ep=2)),
    Layout("mixture", "native", "tp2", 2, _parallel(tp=2)),
    Layout("mixture", "native", "pp2", 2, _parallel(pp=2)),
)
CHANGES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "dense": {WATCHED: {"dropout": 0.1}},
    "mixture": {
        WATCHED: {"dropout": 0.1},
        "middle": {"targets": ("q_proj", "v_proj")},
        "wide": {"targets": ("attention",)},
    },
}
"""Fields of the tenants' configurations. Dropout makes the watched one draw numbers."""

type Found = dict[tuple[str, int], list[str]]
"""(event, seed) -> what of the watched tenant is not what it is alone."""


def isolation_trials(folder: Path) -> dict[str, Any]:
    """``violations`` counts trials in which a byte of the watched tenant, on any rank, is another than alone."""
    dense = write_tiny_qwen3(folder / "dense", num_hidden_layers=4)
    models = {"dense": dense, "mixture": write_tiny_mixture(folder / "mixture")}
    trials: Counter[str] = Counter()
    violations: dict[str, list[str]] = {}
    with closing(RankPool(4, preload=["tests.support.tenant_events"])) as ranks:
        for layout in LAYOUTS:
            arguments = (str(models[layout.model]), layout.backend, layout.settings, CHANGES[layout.model], SEEDS)
            found = ranks.run(differences, *arguments, world_size=layout.world_size, timeout=TIMEOUT_SECONDS)
            for event, seed in found[0]:
                differs = sorted({part for rank in found for part in rank[event, seed]})
                if differs:
                    violations[f"{layout.title}: {event}, seed {seed}"] = differs
            trials[layout.title] += len(found[0])
            print(f"isolation, {layout.title}: {len(found[0])} trials, {len(violations)} violations so far", flush=True)
    return {
        "trials": trials.total(),
        "violations": len(violations),
        "violations_by_trial": violations,
        "trials_by_layout": dict(trials),
        "events": list(EVENTS),
        "seeds": list(SEEDS),
        "steps": STEPS,
        "compared": "bytes of weights, both moments, steps, version, schedule, random state, losses and gradient norms",
    }


def differences(
    model: str, backend: str, settings: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]
) -> Found:
    """All events on this rank."""
    found: Found = {}
    with OPENS[backend](model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        for seed in seeds:
            alone = watched_state(runtime, base, None, seed, changes)
            for event in EVENTS:
                beside = watched_state(runtime, base, event, seed, changes)
                found[event, seed] = [name for name, value in alone.items() if beside[name] != value]
    return found
