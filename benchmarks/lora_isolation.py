"""Trials of isolation: a watched LoRA tenant alone and with active neighbours, in every layout, byte by byte."""

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
from tests.support.tenant_layouts import BRIDGE, NATIVE

SEEDS = (0, 1)
TIMEOUT_SECONDS = 400.0


class Layout(NamedTuple):
    """Layout of the trials.

    Attributes:
        model: ``dense`` or ``mixture``.
        name: of the layout in :mod:`tests.support.tenant_layouts`.
    """

    model: str
    backend: str
    name: str

    @property
    def title(self) -> str:
        return f"{self.model}, {self.backend}, {self.name}"

    @property
    def size_and_settings(self) -> tuple[int, Mapping[str, Any]]:
        """Ranks, and settings of the runtime's configuration."""
        return {"native": NATIVE, "bridge": BRIDGE}[self.backend][self.name]


_DENSE = ("one rank", "dp2", "dp2 recomputed", "tp2", "tp4", "cp2", "pp2", "pp2 zb-h1", "pp2 zbv", "dp2 tp2")
NAMES: Mapping[tuple[str, str], Sequence[str]] = {
    ("dense", "native"): _DENSE,
    ("dense", "bridge"): ("one rank", "dp2", "tp2", "pp2", "pp2 vpp2"),
    ("mixture", "native"): ("one rank", "dp2", "ep2", "tp2", "tp2 etp2", "pp2"),
    ("mixture", "bridge"): ("one rank", "dp2", "ep2", "tp2 ep2", "tp2 etp2", "pp2"),
}
"""(model, backend) -> names of layouts. Four tensor-parallel ranks are more than the model has KV heads."""
LAYOUTS = [Layout(*kind, name) for kind, names in NAMES.items() for name in names]
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
            world_size, settings = layout.size_and_settings
            arguments = (str(models[layout.model]), layout.backend, settings, CHANGES[layout.model], SEEDS)
            found = ranks.run(differences, *arguments, world_size=world_size, timeout=TIMEOUT_SECONDS)
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
