"""docs/capabilities.md, made of ``results/families.json``: what was measured of each family, and what is refused and why.


``python -m benchmarks.capabilities`` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.family_models import FAMILIES, SAME_CODE
from benchmarks.family_push import LARGEST_GAP, MOST_OVER_TRANSFORMERS, engine_refusals
from benchmarks.markdown import number, table
from benchmarks.random_section import RANDOM, ROUNDING, did_not_pass, random_shapes
from benchmarks.report import read_result
from rl_backend.lab.parity.text import LEAST_LOSS_FALL

PAGE = Path(__file__).parents[1] / "docs" / "capabilities.md"
MISSING = "-"
HEAD = """\
# Capabilities

`python -m benchmarks.capabilities` makes this page of `benchmarks/results/families.json`, which `make bench NAME=families`
measures. A number in brackets is a refusal, or behind numbers a difference over its tolerance, both listed at the end; - was
not measured. Qwen3.5 is its text model. {same_code}
"""
PARITY = """\
## Against transformers
Differences from transformers, one sequence at a time: the largest of a log-prob, then the largest of a parameter's
gradient relative to its norm, both in the first of {steps} steps in float32; then that of the loss, relative, in all of
them. Sequences have {shortest} to {longest} tokens and are packed here. The last column compares the two runtimes. Where two
experts of a mixture are equal to a token but for rounding, sides that agree in the first step [part](parity.md) later. Of
two keys that an indexer is to choose from the same could be. A difference that says so was measured again on what
transformers chose; where all steps agree on that, the sides count as exact.
"""
LAYOUTS = """\
## Layouts
Differences of each layout from one rank of the same runtime: the largest of a log-prob, then the largest of a parameter's
gradient relative to its norm, in float32.
"""
PUSH = """\
## Pushes to vLLM
The gap between the trainer's log-probs and those of a vLLM engine that its weights were pushed to, before training and
after each of {steps} steps: the largest mean of a push, and the largest of a token, in nats. The engine started with other
weights. In bfloat16, the last columns have the gap of transformers in bfloat16 to itself in float32, and the first mean
over this one.
"""
LOADS = """\
## Loads of experts
The largest load of an expert over the mean, in the layer where that is largest, on a task with few frequent tokens, with
routers that prefer half of the experts: in the first step and over the last {last} of {steps}, with loss-free balancing and
without.
"""
SPEED = """\
## Speed
Native training over transformers with fused AdamW, tokens per second: sequences of equal length, and of mixed ones (packed
against padded). Medians of interleaved steps in float32 on 2 cores of the processor in the last column; the workloads are
those of `benchmarks/train_speed.py`. Ratios depend on the processor: [measurements](measurements.md) has those of qwen3
on two.
"""
ENGINES = """\
## What vLLM cannot serve
Refused by name before an engine starts, with what happens otherwise.
"""

type Entry = Mapping[str, Any]


class Refusals:
    """Messages in the order in which they are met, and of which families."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def mark(self, family: str, message: str) -> str:
        """The number that stands for the message."""
        families = self._families.setdefault(" ".join(message.split()), [])
        if family not in families:
            families.append(family)
        return f"[{list(self._families).index(' '.join(message.split())) + 1}]"

    def lines(self) -> list[str]:
        return [
            f"{number}. {', '.join(families)}: {message}"
            for number, (message, families) in enumerate(self._families.items(), 1)
        ]


def page(results: Mapping[str, Any]) -> str:
    """The whole page; sections of which nothing was measured are left out.

    Args:
        results: what ``families.json`` holds.
    """
    entries: dict[str, Entry] = {name: results.get(name, {}) for name in FAMILIES}
    refusals = Refusals()
    sections = [
        _parity(entries, refusals),
        _layouts(entries, refusals),
        _push(entries, refusals),
        _loads(entries),
        _speed(entries),
    ]
    trials = [results[section] for section in RANDOM if section in results]
    sections += [random_shapes(title, results[section]) for section, title in RANDOM.items() if section in results]
    sections.append(ROUNDING if any(map(did_not_pass, trials)) else "")
    sections.append(_engine_refusals(engine_refusals()))
    sections.append("\n".join(["## Refusals and differences", *refusals.lines(), ""]) if refusals.lines() else "")
    same_code = " ".join(f"{name} runs {other}'s code and was not measured by itself." for name, other in SAME_CODE.items())
    return "\n".join([HEAD.format(same_code=same_code), *filter(None, sections)])


def _parity(entries: Mapping[str, Entry], refusals: Refusals) -> str:
    measured = [entry["parity"] for entry in entries.values() if "parity" in entry]
    if not measured:
        return ""
    text = PARITY.format(
        steps=_common(part["steps"] for part in measured),
        shortest=_common(part["lengths"]["min_length"] for part in measured),
        longest=_common(part["lengths"]["max_length"] for part in measured),
    )

    def show(cell: Entry) -> str:
        return f"{_first_step(cell)}, {number(cell['max_loss_rel_diff'])}"

    def cell(name: str, pair: str) -> str:
        measured = entries[name].get("parity", {}).get("pairs", {}).get(pair)
        return _cell(name, measured, refusals, show, partial(_difference, least_fall=LEAST_LOSS_FALL))

    rows = [(name, *(cell(name, pair) for pair in ("native", "bridge", "native_to_bridge"))) for name in entries]
    columns = table(("family", "native", "bridge", "native against bridge"), rows)
    corrected = {
        name: entry["parity"]["corrected"] for name, entry in entries.items() if "corrected" in entry.get("parity", {})
    }
    notes = [f"- {name}: {what}" for name, what in corrected.items()]
    return "\n".join([text, columns, *(["Corrected in transformers:", "", *notes, ""] if notes else [])])


def _layouts(entries: Mapping[str, Entry], refusals: Refusals) -> str:
    found = {name: entry["layouts"]["layouts"] for name, entry in entries.items() if "layouts" in entry}
    columns = list(dict.fromkeys(layout for cells in found.values() for layout in cells))
    tables = []
    for runtime in ("native", "bridge"):
        own = [layout for layout in columns if layout.startswith(f"{runtime} ")]
        rows = [
            (name, *(_cell(name, cells.get(layout), refusals, _first_step, _difference) for layout in own))
            for name, cells in found.items()
        ]
        tables.append(table((runtime, *(layout.removeprefix(f"{runtime} ") for layout in own)), rows))
    return "\n".join([LAYOUTS, *tables]) if found else ""


def _push(entries: Mapping[str, Entry], refusals: Refusals) -> str:
    measured = {name: entry["push"] for name, entry in entries.items() if "push" in entry}
    if not measured:
        return ""

    def gaps(cell: Entry) -> str:
        return f"{cell['mean_gap']:.0e}, {cell['max_gap']:.0e}"

    def too_wide(cell: Entry) -> str:
        return "" if cell["mean_gap"] <= LARGEST_GAP else f"a mean gap in float32 over {LARGEST_GAP:.0e}"

    def times(cell: Entry) -> str:
        return f"{cell['mean_gap_over_transformers']:.2f}x"

    def too_often(cell: Entry) -> str:
        many = cell["mean_gap_over_transformers"] > MOST_OVER_TRANSFORMERS
        return f"a mean gap in bfloat16 over {MOST_OVER_TRANSFORMERS:g} times that of transformers" if many else ""

    rows = []
    for name, part in measured.items():
        exact, rounded = part["dtypes"]["float32"], part["dtypes"]["bfloat16"]
        own = rounded.get("transformers_to_float32")
        ratio = rounded if "mean_gap_over_transformers" in rounded else None
        rows.append(
            (
                name,
                _cell(name, exact, refusals, gaps, too_wide),
                _cell(name, rounded, refusals, gaps),
                MISSING if own is None else gaps(own),
                _cell(name, ratio, refusals, times, too_often),
            )
        )
    steps = _common(part["steps"] for part in measured.values())
    return PUSH.format(steps=steps) + "\n" + table(("family", "float32", "bfloat16", "transformers", "over it"), rows)


def _loads(entries: Mapping[str, Entry]) -> str:
    measured = {name: entry["loads"] for name, entry in entries.items() if "loads" in entry}
    if not measured:
        return ""
    text = LOADS.format(
        steps=_common(part["steps"] for part in measured.values()),
        last=_common(part["measured_over_last_steps"] for part in measured.values()),
    )
    rows = [
        (
            name,
            *(f"{part['max_over_mean'][when]:.2f}" for when in ("before", "after")),
            f"{part['max_over_mean_without_balancing']['after']:.2f}",
        )
        for name, part in measured.items()
    ]
    return text + "\n" + table(("family", "first step", "last steps", "last steps without"), rows)


def _speed(entries: Mapping[str, Entry]) -> str:
    names = ("equal_lengths", "mixed_lengths")
    measured = {name: entry.get("native_over_transformers", {}) for name, entry in entries.items()}
    rows = [
        (name, *(f"{ratios[workload]:.2f}x" if ratios else MISSING for workload in names), _processor(entries[name]))
        for name, ratios in measured.items()
    ]
    head = ("family", "equal lengths", "mixed lengths", "processor")
    return SPEED + "\n" + table(head, rows) if any(measured.values()) else ""


def _processor(entry: Entry) -> str:
    if "speed" not in entry:
        return MISSING
    name = str(entry["speed"]["machine"]["processor"])
    return " ".join(name.replace("(R)", "").removesuffix("Processor").split())


def _engine_refusals(refusals: Iterable[Entry]) -> str:
    rows = [
        (", ".join(each["model_types"]) or "all", each["device"], each["what"], each["measured"], each["instead"])
        for each in refusals
    ]
    return ENGINES + "\n" + table(("models", "device", "what", "what happens", "instead"), rows)


def _first_step(cell: Entry) -> str:
    return f"{number(cell['max_log_prob_diff'])}, {number(cell['max_gradient_rel_diff'])}"


def _difference(cell: Entry, least_fall: float | None = None) -> str:
    """How a comparison is not as it has to be, as :func:`benchmarks.families.is_exact` has it; empty where it is.

    Sides that alone part by themselves are exact, and are named with both.
    """
    parted = cell.get("first_divergence")
    if parted:
        again = cell.get("on_their_choices")
        if again is None:
            return str(parted)
        steps = "all steps are" if again["step"] is None else f"step {again['step']} is the first that is not"
        return f"{parted}; on what transformers chose {steps} within the tolerances"
    if least_fall is not None and cell["loss_fall"] < least_fall:
        return f"the loss falls by {cell['loss_fall']:.1%} only, less than {least_fall:.0%}"
    return ""


def _cell(
    family: str,
    cell: Entry | None,
    refusals: Refusals,
    show: Callable[[Entry], str],
    difference: Callable[[Entry], str] = lambda cell: "",
) -> str:
    if cell is None:
        return MISSING
    if "refused" in cell:
        return refusals.mark(family, cell["refused"])
    if "failed" in cell:
        return f"failed {refusals.mark(family, cell['failed'])}"
    found = difference(cell)
    return f"{show(cell)} {refusals.mark(family, found)}" if found else show(cell)


def _common(values: Iterable[int]) -> str:
    """The value that all parts have, or each of them."""
    return " or ".join(map(str, sorted(set(values))))


if __name__ == "__main__":
    PAGE.write_text(page(read_result("families")), encoding="utf-8")
