"""``python -m benchmarks.parity --random N``: parity with transformers on random odd shapes, for each runtime.

Shapes are drawn by seed until each runtime has accepted N, a third of them mixtures of experts. Each side trains in one
process that stays, so that a shape takes seconds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_models import RandomModel, draw, write_model
from benchmarks.report import machine, read_result, update_result
from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.parity import ParityConfig, ParitySide, SideRecord, Tolerances, compare_sides
from rl_backend.parity.batches import plan_batch
from rl_backend.parity.record import RankRecord, merge_ranks
from rl_backend.parity.runtime_side import record_runtime
from rl_backend.parity.transformers_side import record_transformers

RUNTIMES = ("native", "bridge")
LEAST_MIXTURES = 1 / 3
TIMEOUT_SECONDS = 600.0
_MODELS_PER_PROCESS = 25

type Outcome = dict[str, Any]


class _Sides:
    """A process for each side, made again after it died or hung."""

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def record(self, config: ParityConfig, runtime: str, output: Path) -> Outcome:
        """What :func:`_record` returns, or why nothing came back."""
        if runtime not in self._pools:
            self._pools[runtime] = ProcessPoolExecutor(
                1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=_MODELS_PER_PROCESS
            )
        future: Future[Outcome] = self._pools[runtime].submit(_record, config.model_dump_json(), str(output))
        try:
            return future.result(timeout=TIMEOUT_SECONDS)
        except FutureTimeoutError:
            self.close()
            return {"outcome": "failed", "error": f"did not end within {TIMEOUT_SECONDS:g} s"}
        except BrokenProcessPool as error:
            self.close()
            return {"outcome": "failed", "error": str(error)}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._pools.clear()
        for process in multiprocessing.active_children():
            process.kill()


def _record(config_json: str, output: str) -> Outcome:
    """Trains the candidate of ``config`` in this process."""
    torch.set_num_threads(1)
    config = ParityConfig.model_validate_json(config_json)
    side = config.candidate
    try:
        record = record_transformers(config, side) if side.runtime == "transformers" else record_runtime(config, side, 0)
    except (ConfigError, UnsupportedError) as error:
        return {"outcome": "refused", "refusal": str(error)}
    except Exception:  # noqa: BLE001 - the result holds it
        return {"outcome": "failed", "error": traceback.format_exc()[-2000:]}
    record.save(Path(output))
    return {"outcome": "recorded"}


def run_random(count: int, *, go_on: bool) -> bool:
    """Draws, compares and writes after every shape. Returns whether all accepted shapes passed.

    Args:
        count: accepted shapes for each runtime.
        go_on: keeps what the file has passed or refused, and tries again what failed.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    earlier: dict[str, Any] = read_result("parity").get("random_shapes", {}).get("shapes", {}) if go_on else {}
    shapes: dict[str, dict[str, Any]] = {}
    sides = _Sides()
    try:
        for seed in itertools.count():
            missing = [runtime for runtime in RUNTIMES if _is_missing(runtime, shapes, count)]
            if not missing:
                break
            model = draw(seed)
            known = _known(earlier.get(str(seed)), model)
            shape: dict[str, Any] = {
                "family": model.family,
                "mixture": model.is_mixture,
                "settings": model.settings,
                **known,
            }
            wanted = [runtime for runtime in missing if runtime not in known]
            if wanted:
                shape |= compare_shape(model, seed, wanted, sides)
            shapes[str(seed)] = shape
            if wanted:
                update_result("parity", {"random_shapes": _summary(shapes)})
                print(
                    f"{seed} {model.family}: " + ", ".join(f"{name} {_in_words(shape[name])}" for name in wanted), flush=True
                )
    finally:
        sides.close()
    summary = _summary(shapes)
    print(update_result("parity", {"random_shapes": summary}))
    return bool(summary["passed"] == summary["accepted"])


def compare_shape(model: RandomModel, seed: int, runtimes: list[str], sides: _Sides) -> dict[str, Outcome]:
    """Each runtime against transformers."""
    with tempfile.TemporaryDirectory(prefix="rl-backend-parity-") as folder:
        directory = write_model(model, seed, Path(folder) / "model")
        reference = _side("transformers", directory, seed, sides, Path(folder))
        outcomes = {}
        for runtime in runtimes:
            found = _side(runtime, directory, seed, sides, Path(folder))
            if isinstance(reference, SideRecord):
                outcomes[runtime] = _verdict(_config(runtime, directory, seed), reference, found)
            else:
                # A shape without a reference shows nothing about the runtime.
                outcomes[runtime] = {"outcome": "failed", "error": f"transformers: {reference}"}
        return outcomes


def _side(runtime: str, model: Path, seed: int, sides: _Sides, folder: Path) -> SideRecord | Outcome:
    config, output = _config(runtime, model, seed), folder / f"{runtime}.pt"
    outcome = sides.record(config, runtime, output)
    return outcome if outcome["outcome"] != "recorded" else merge_ranks([RankRecord.load(output)], plan_batch(config, 1))


def _config(runtime: str, model: Path, seed: int) -> ParityConfig:
    reference, candidate = ParitySide(runtime="transformers"), ParitySide(runtime=runtime)
    return ParityConfig(model=str(model), reference=reference, candidate=candidate, lr=1e-4, seed=seed, device="cpu")


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
