"""docs/capabilities.md, made of ``results/families.json``: what was measured of each family, and what is refused and why.

``python -m benchmarks.capabilities`` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.edge_routes import MARGIN
from benchmarks.family_models import FAMILIES
from benchmarks.parity_random import FROM_FLOAT64, MOST_OVER_TRANSFORMERS
from benchmarks.report import read_result

PAGE = Path(__file__).parents[1] / "docs" / "capabilities.md"
MISSING = "-"
HEAD = """\
# Capabilities

`python -m benchmarks.capabilities` makes this page of `benchmarks/results/families.json`, which `make bench NAME=families`
measures. A number in brackets is a refusal, listed at the end; - was not measured. Qwen3.5 is its text model.
"""
PARITY = """\
## Against transformers
Differences from transformers, one sequence at a time: the largest of a log-prob, then the largest of a parameter's
gradient relative to its norm, both in the first of {steps} steps in float32; then that of the loss, relative, in all of
them. Sequences have {shortest} to {longest} tokens and are packed here. The last column compares the two runtimes. Where two
experts of a mixture are equal to a token but for rounding, sides that agree in the first step [part](parity.md) later.
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
against padded). Medians of interleaved steps in float32 on a CPU; the workloads are those of `benchmarks/train_speed.py`.
"""
RANDOM = {
    "random_shapes": """\
## Random shapes
Odd shapes of stacks with gated DeltaNet (heads, sizes, kinds of layers, vocabularies), drawn by seed and compared with
transformers.
""",
    "random_latents": """\
### Latent attention and grouped routers
The same for stacks of latent attention (heads, ranks, widths of keys and values, rotary embeddings) and of mixtures behind
routers with groups. Where two groups are equal to a token but for rounding, sides that agree in the first step part later.
""",
    "random_mixtures": """\
### GLM-4.5, gpt-oss and MiniMax-M2
The same for these, 30 of each: heads, parts of them that rotate, windows, groups, widths of experts and of dense blocks.
""",
}
"""Section of the results -> what it is."""
ROUNDING = f"""\
Rounding parts a shape from transformers where it is at most {MOST_OVER_TRANSFORMERS:.0f} times as far from transformers in
float64 as transformers in float32 is, and within {FROM_FLOAT64["max_loss_rel_diff"]:.0e} of its losses and
{FROM_FLOAT64["gradient_rel_diff"]:.0e} of the gradient of the first step. A shape parts at an edge where it is
within these, and the first tokens that it gives other experts than float64 does are indifferent between them by a
margin below {MARGIN:.0e}. Not passed:
"""
_WORDS = {"failed": "failed", "rounding": "parted by rounding", "edge": "parted at an edge"}
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
    sections += [_random_shapes(title, results[section]) for section, title in RANDOM.items() if section in results]
    sections.append(_engine_refusals(results["engine_refusals"]) if "engine_refusals" in results else "")
    sections.append("\n".join(["## Refusals", *refusals.lines(), ""]) if refusals.lines() else "")
    return "\n".join([HEAD, *filter(None, sections)])


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
        return f"{_first_step(cell)}, {_number(cell['max_loss_rel_diff'])}"

    pairs = ("native", "bridge", "native_to_bridge")
    rows = [
        (name, *(_cell(name, entry.get("parity", {}).get("pairs", {}).get(pair), refusals, show) for pair in pairs))
        for name, entry in entries.items()
    ]
    table = _table(("family", "native", "bridge", "native against bridge"), rows)
    corrected = {
        name: entry["parity"]["corrected"] for name, entry in entries.items() if "corrected" in entry.get("parity", {})
    }
    notes = [f"- {name}: {what}" for name, what in corrected.items()]
    return "\n".join([text, table, *(["Corrected in transformers:", "", *notes, ""] if notes else [])])


def _layouts(entries: Mapping[str, Entry], refusals: Refusals) -> str:
    found = {name: entry["layouts"]["layouts"] for name, entry in entries.items() if "layouts" in entry}
    columns = list(dict.fromkeys(layout for cells in found.values() for layout in cells))
    tables = []
    for runtime in ("native", "bridge"):
        own = [layout for layout in columns if layout.startswith(f"{runtime} ")]
        rows = [
            (name, *(_cell(name, cells.get(layout), refusals, _first_step) for layout in own))
            for name, cells in found.items()
        ]
        tables.append(_table((runtime, *(layout.removeprefix(f"{runtime} ") for layout in own)), rows))
    return "\n".join([LAYOUTS, *tables]) if found else ""


def _push(entries: Mapping[str, Entry], refusals: Refusals) -> str:
    measured = {name: entry["push"] for name, entry in entries.items() if "push" in entry}
    if not measured:
        return ""

    def gaps(cell: Entry) -> str:
        return f"{cell['mean_gap']:.0e}, {cell['max_gap']:.0e}"

    rows = []
    for name, part in measured.items():
        exact, rounded = part["dtypes"]["float32"], part["dtypes"]["bfloat16"]
        own = rounded.get("transformers_to_float32")
        ratio = rounded.get("mean_gap_over_transformers")
        rows.append(
            (
                name,
                _cell(name, exact, refusals, gaps),
                _cell(name, rounded, refusals, gaps),
                MISSING if own is None else gaps(own),
                MISSING if ratio is None else f"{ratio:.2f}x",
            )
        )
    steps = _common(part["steps"] for part in measured.values())
    return PUSH.format(steps=steps) + "\n" + _table(("family", "float32", "bfloat16", "transformers", "over it"), rows)


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
    return text + "\n" + _table(("family", "first step", "last steps", "last steps without"), rows)


def _speed(entries: Mapping[str, Entry]) -> str:
    names = ("equal_lengths", "mixed_lengths")
    rows = [
        (name, *(f"{entry['native_over_transformers'][workload]:.2f}x" for workload in names))
        for name, entry in entries.items()
        if "native_over_transformers" in entry
    ]
    return SPEED + "\n" + _table(("family", "equal lengths", "mixed lengths"), rows) if rows else ""


def _random_shapes(title: str, trial: Mapping[str, Any]) -> str:
    rows = [
        (
            runtime,
            str(accepted),
            str(trial["accepted_mixtures"][runtime]),
            str(trial["passed"][runtime]),
            *(str(trial.get(how, {}).get(runtime, 0)) for how in ("parted_by_rounding", "parted_at_an_edge")),
            str(len(trial["refusals"][runtime])),
        )
        for runtime, accepted in trial["accepted"].items()
    ]
    failed = [
        f"- {_WORDS[shape[runtime]['outcome']]}: {runtime}, seed {seed}, {shape['family']}: {shape[runtime]['error']}"
        f"{_to_float64(shape[runtime])}"
        for seed, shape in trial["shapes"].items()
        for runtime in trial["accepted"]
        if shape.get(runtime, {}).get("outcome") in _WORDS
    ]
    titles = ("runtime", "accepted", "mixtures among them", "passed", "parted by rounding", "parted at an edge", "refused")
    table = _table(titles, rows)
    return "\n".join([title, table, *([ROUNDING, *failed, ""] if failed else [])])


def _to_float64(outcome: Entry) -> str:
    """How far both sides of a failure are from transformers in float64, where that was measured."""
    if "to_float64" not in outcome:
        return ""
    if outcome["outcome"] == "edge":
        step, tokens, margin = outcome["first_other_routes"].values()
        return (
            f". Tokens with other experts in step {step}, the first with any: {tokens}, by a margin of at most {margin:.0e}"
        )
    sides = outcome["to_float64"].values()
    gradient, norm = (
        " and ".join(_number(found[figure]) for found in sides) for figure in ("gradient_rel_diff", "max_grad_norm_rel_diff")
    )
    return (
        f". It and transformers in float32 are from transformers in float64: {gradient} in the gradient of the first step, "
        f"{norm} in the gradient norm of a step"
    )


def _engine_refusals(refusals: Iterable[Entry]) -> str:
    rows = [
        (", ".join(each["model_types"]) or "all", each["device"], each["what"], each["measured"], each["instead"])
        for each in refusals
    ]
    return ENGINES + "\n" + _table(("models", "device", "what", "what happens", "instead"), rows)


def _first_step(cell: Entry) -> str:
    return f"{_number(cell['max_log_prob_diff'])}, {_number(cell['max_gradient_rel_diff'])}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.0e}"


def _cell(family: str, cell: Entry | None, refusals: Refusals, show: Callable[[Entry], str]) -> str:
    if cell is None:
        return MISSING
    if "refused" in cell:
        return refusals.mark(family, cell["refused"])
    if "failed" in cell:
        return f"failed {refusals.mark(family, cell['failed'])}"
    return show(cell)


def _common(values: Iterable[int]) -> str:
    """The value that all parts have, or each of them."""
    return " or ".join(map(str, sorted(set(values))))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(read_result("families")), encoding="utf-8")
