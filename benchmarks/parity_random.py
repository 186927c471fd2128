"""``python -m benchmarks.parity --random N``: parity with transformers on random odd shapes, for each runtime.

Shapes are drawn by seed until each runtime has accepted N, a third of them mixtures of experts.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.forked_ranks import start_forked_rank
from benchmarks.parity_float64 import distance, float64_steps
from benchmarks.random_models import RandomModel, draw, write_model
from benchmarks.report import machine, read_result, update_result
from rl_backend.contracts import ConfigError, RLBackendError, UnsupportedError
from rl_backend.lab.parity.compare import SideRecord, Tolerances
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide
from rl_backend.lab.parity.run import compare_sides, record_side
from rl_backend.lab.text import finite

RUNTIMES = ("native", "bridge")
LEAST_MIXTURES = 1 / 3
LENGTHS = 2, 48
"""Tokens of the shortest and of the longest sequence of a batch."""
RESULT, SECTION = "parity", "random_shapes"
FROM_FLOAT64: Mapping[str, float] = {
    "gradient_rel_diff": 1e-5,
    "max_loss_rel_diff": 1e-4,
    "max_grad_norm_rel_diff": 1e-3,
}
"""Figure of :func:`~benchmarks.parity_float64.distance` -> what rounding comes to at most, where a shape amplifies it."""

MOST_OVER_TRANSFORMERS = 3.0
"""So many times as far from float64 as transformers in float32 is."""

TIMEOUT_SECONDS = 600.0
_ERROR_LENGTH = 2000

type Outcome = dict[str, Any]


def run_random(count: int, *, go_on: bool) -> bool:
    """Draws, compares and writes after every shape. Returns whether nothing but rounding parted an accepted shape.

    Args:
        count: accepted shapes for each runtime.
        go_on: keeps what the file has passed or refused, and tries again what failed.
    """
    earlier: dict[str, Any] = read_result(RESULT).get(SECTION, {}).get("shapes", {}) if go_on else {}
    shapes: dict[str, dict[str, Any]] = {}
    for seed in itertools.count():
        missing = [runtime for runtime in RUNTIMES if _is_missing(runtime, shapes, count)]
        if not missing:
            break
        model = draw(seed)
        known = _known(earlier.get(str(seed)), model)
        shape: dict[str, Any] = {"family": model.family, "mixture": model.is_mixture, "settings": model.settings, **known}
        wanted = [runtime for runtime in missing if runtime not in known]
        if wanted:
            shape |= compare_shape(model, seed, wanted)
        shapes[str(seed)] = shape
        if wanted:
            # A run that is stopped here loses nothing of an earlier one.
            later = {name: shape for name, shape in earlier.items() if int(name) > seed}
            update_result(RESULT, {SECTION: _summary({**shapes, **later})})
            print(f"{seed} {model.family}: " + ", ".join(f"{name} {_in_words(shape[name])}" for name in wanted), flush=True)
    summary = _summary(shapes)
    print(update_result(RESULT, {SECTION: summary}))
    return all(
        summary["passed"][name] + summary["parted_by_rounding"][name] == count for name, count in summary["accepted"].items()
    )


def compare_shape(model: RandomModel, seed: int, runtimes: list[str]) -> dict[str, Outcome]:
    """Each runtime against transformers."""
    with tempfile.TemporaryDirectory(prefix="rl-backend-parity-") as name:
        folder = Path(name)
        directory = write_model(model, seed, folder / "model")
        configs = {side: _config(side, directory, seed) for side in (TRANSFORMERS, *runtimes)}
        sides = {side: _record(config, folder / side) for side, config in configs.items()}
        reference = sides.pop(TRANSFORMERS)
        if not isinstance(reference, SideRecord):
            # A shape without a reference shows nothing about the runtimes.
            return {runtime: {"outcome": "failed", "error": f"transformers: {reference}"} for runtime in runtimes}
        outcomes = {side: _verdict(configs[side], reference, found) for side, found in sides.items()}
        return _beside_float64(outcomes, configs[TRANSFORMERS], {TRANSFORMERS: reference, **sides})


def _beside_float64(
    outcomes: dict[str, Outcome], config: ParityConfig, sides: Mapping[str, SideRecord | Outcome]
) -> dict[str, Outcome]:
    """Adds to each failure with figures how far the runtime and transformers are from transformers in float64.

    A shape that amplifies rounding has both as far from it: then the outcome is "rounding". After a fault, the runtime alone
    is.
    """
    failed = [name for name, outcome in outcomes.items() if outcome["outcome"] == "failed" and name in _trained(sides)]
    if failed:
        exact = float64_steps(config)
        found = {name: finite(distance(exact, side)) for name, side in _trained(sides).items()}
        for name in failed:
            outcomes[name]["to_float64"] = {"runtime": found[name], TRANSFORMERS: found[TRANSFORMERS]}
            if is_rounding(found[name], found[TRANSFORMERS]):
                outcomes[name]["outcome"] = "rounding"
    return outcomes


def is_rounding(runtime: Mapping[str, float | None], transformers: Mapping[str, float | None]) -> bool:
    """True if two sides part in float32 by rounding alone, judged by the distance of each from transformers in float64.

    None is a figure that is not finite.
    """
    pairs = ((runtime[figure], transformers[figure], most) for figure, most in FROM_FLOAT64.items())
    return all(
        ours is not None and theirs is not None and ours <= min(most, MOST_OVER_TRANSFORMERS * theirs)
        for ours, theirs, most in pairs
    )


def _trained(sides: Mapping[str, SideRecord | Outcome]) -> dict[str, SideRecord]:
    return {name: side for name, side in sides.items() if isinstance(side, SideRecord)}


def _record(config: ParityConfig, folder: Path) -> SideRecord | Outcome:
    try:
        return record_side(config, "candidate", folder, start_forked_rank)
    except RLBackendError as error:
        message = str(error).replace(config.model, "MODEL")
        if is_refusal(error):
            return {"outcome": "refused", "refusal": message}
        return {"outcome": "failed", "error": message[-_ERROR_LENGTH:]}


def is_refusal(error: RLBackendError) -> bool:
    """True if a runtime does not support the model or layout, here or in the process of a rank."""
    return isinstance(error, ConfigError | UnsupportedError) or bool(error.details.get("refused", False))


def _config(runtime: str, model: Path, seed: int) -> ParityConfig:
    return ParityConfig(
        model=str(model),
        reference=ParitySide(runtime=TRANSFORMERS),
        candidate=ParitySide(runtime=runtime),
        lr=1e-4,
        seed=seed,
        min_length=LENGTHS[0],
        max_length=LENGTHS[1],
        device="cpu",
        timeout=TIMEOUT_SECONDS,
    )


def _verdict(config: ParityConfig, reference: SideRecord, found: SideRecord | Outcome) -> Outcome:
    if not isinstance(found, SideRecord):
        return found
    comparison = compare_sides(config, reference, found, Tolerances.of("float32"))
    divergence = comparison.first_divergence
    return {
        "outcome": "passed" if divergence is None else "failed",
        "max_loss_rel_diff": comparison.max_loss_difference,
        "max_grad_norm_rel_diff": comparison.max_grad_norm_difference,
        "loss_fall": comparison.loss_fall,
        **({} if divergence is None else {"error": str(divergence)}),
    }


def _known(earlier: Mapping[str, Any] | None, model: RandomModel) -> dict[str, Outcome]:
    if earlier is None or (earlier["family"], earlier["settings"]) != (model.family, model.settings):
        return {}
    return {name: earlier[name] for name in RUNTIMES if name in earlier and earlier[name]["outcome"] != "failed"}


def _accepted(runtime: str, shapes: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [shape for shape in shapes.values() if runtime in shape and shape[runtime]["outcome"] != "refused"]


def _is_missing(runtime: str, shapes: Mapping[str, Mapping[str, Any]], count: int) -> bool:
    accepted = _accepted(runtime, shapes)
    return len(accepted) < count or sum(shape["mixture"] for shape in accepted) < count * LEAST_MIXTURES


def _summary(shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    accepted = {runtime: _accepted(runtime, shapes) for runtime in RUNTIMES}
    passed = {name: [shape for shape in found if shape[name]["outcome"] == "passed"] for name, found in accepted.items()}
    return {
        "tried": len(shapes),
        "accepted": {name: len(found) for name, found in accepted.items()},
        "accepted_mixtures": {name: sum(shape["mixture"] for shape in found) for name, found in accepted.items()},
        "passed": {name: len(found) for name, found in passed.items()},
        "parted_by_rounding": {
            name: sum(shape[name]["outcome"] == "rounding" for shape in found) for name, found in accepted.items()
        },
        "max_loss_rel_diff": _largest(passed, "max_loss_rel_diff"),
        "max_grad_norm_rel_diff": _largest(passed, "max_grad_norm_rel_diff"),
        "refusals": {
            name: {
                seed: shape[name]["refusal"]
                for seed, shape in shapes.items()
                if shape.get(name, {}).get("outcome") == "refused"
            }
            for name in RUNTIMES
        },
        "shapes": dict(shapes),
        "machine": machine(),
    }


def _largest(shapes: Mapping[str, list[Mapping[str, Any]]], figure: str) -> dict[str, float]:
    return {name: max((shape[name][figure] for shape in found), default=0.0) for name, found in shapes.items()}


def _in_words(outcome: Outcome) -> str:
    if outcome["outcome"] == "passed":
        return f"passed (grad norm {outcome['max_grad_norm_rel_diff']:.1e})"
    return f"{outcome['outcome']}: {(outcome.get('refusal') or outcome['error']).strip().splitlines()[-1]}"
