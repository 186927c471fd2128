"""The tables of docs/reference/verl_fields.md: what becomes of each field of verl's configurations.

python -m tests.support.verl_fields      writes them into docs/reference/verl_fields.md
"""

from __future__ import annotations

from collections.abc import Mapping

from adapters.verl import field_decisions, megatron_decisions
from adapters.verl.field_decisions import Decision
from adapters.verl.lora_settings import LORA
from adapters.verl.megatron_decisions import MegatronField
from tests.support.claims import ROOT

PAGE = ROOT / "docs" / "reference" / "verl_fields.md"
MEGATRON_TABLES = {
    "override_transformer_config": megatron_decisions.TRANSFORMER,
    "override_ddp_config": megatron_decisions.DDP,
    "override_optimizer_config": megatron_decisions.OPTIMIZER,
}
START, END = "<!-- fields: from adapters/verl/field_decisions.py -->", "<!-- end of fields -->"
TABLES = {
    "Engine": ("`McoreEngineConfig`", field_decisions.ENGINE),
    "Router replay": ("`McoreEngineConfig.router_replay`", field_decisions.ROUTER_REPLAY),
    "Quantization": ("`McoreEngineConfig.qat`", field_decisions.QAT),
    "Optimizer": ("`McoreOptimizerConfig`", field_decisions.OPTIMIZER),
    "Model": ("`HFModelConfig`", field_decisions.MODEL),
    "LoRA": ("`HFModelConfig.lora`", LORA),
    "Multi-token prediction": ("`HFModelConfig.mtp`", field_decisions.MTP),
    "Checkpoint": ("`CheckpointConfig`, `McoreCheckpointConfig`", field_decisions.CHECKPOINT),
}


def tables() -> str:
    """The tables in Markdown; fields with one decision share a row."""
    parts = []
    for title, (classes, decisions) in TABLES.items():
        rows = [f"## {title}: {classes}", "| field | what becomes of it |", "|---|---|"]
        rows += [f"| {', '.join(f'`{name}`' for name in names)} | {becomes} |" for becomes, names in _rows(decisions)]
        parts.append("\n".join(rows))
    parts += [_megatron_table(title, fields) for title, fields in MEGATRON_TABLES.items()]
    return "\n\n".join(parts)


def _megatron_table(title: str, fields: Mapping[str, MegatronField]) -> str:
    rows: dict[tuple[str, str, tuple[object, ...]], list[str]] = {}
    for name, field in fields.items():
        rows.setdefault((field.native, field.bridge, field.at_rest), []).append(name)
    lines = [f"## Megatron's fields in `{title}`", "| field | asks for nothing | native | bridge |", "|---|---|---|---|"]
    for (native, bridge, at_rest), names in rows.items():
        values = ", ".join(f"`{value!r}`" for value in at_rest)
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {values} | {native} | {bridge} |")
    return "\n".join(lines)


def page_with_tables() -> str:
    """docs/reference/verl_fields.md with the tables between its markers brought up to date."""
    head, rest = PAGE.read_text().split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n{tables()}\n{END}{tail}"


def _rows(decisions: Mapping[str, Decision]) -> list[tuple[str, list[str]]]:
    rows: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        if name != "_target_":
            rows.setdefault(_becomes(decision), []).append(name)
    return list(rows.items())


def _becomes(decision: Decision) -> str:
    if decision.kind == "mapped":
        return decision.text
    if decision.kind == "no meaning":
        return f"no meaning here: {decision.text}"
    unless = " or ".join(f"`{value!r}`" for value in decision.accepts)
    return f"refused{f' unless {unless}' if unless else ''}: {decision.text}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
