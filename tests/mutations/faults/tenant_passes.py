"""Passes of LoRA tenants: how sequences are cut, what is refused, and results of a loss that fails."""

from __future__ import annotations

from tests.mutations.fault import Fault

_REFUSALS = "tests/distributed/test_lora_refusals.py"
_DATA = f"{_REFUSALS}::test_refused_data_leaves_gradients_and_dropout_as_they_were_on_every_rank"

FAULTS = [
    Fault(
        "column-of-a-tenant-behind-its-later-ones",
        "rl_backend/data/balance.py",
        "filled.insert(source + 1, [filled[source].pop()])",
        "filled.append([filled[source].pop()])",
        (
            "tests/unit/rl_backend/data/test_tenant_plans.py::test_a_column_that_moves_to_make_a_multiple_keeps_its_tenants_order",
        ),
        "a tenant's gradients would be added up in an order that depends on who is beside it",
    ),
    Fault(
        "tenants-of-a-pass-not-compared-between-ranks",
        "rl_backend/runtime/tenant_pass.py",
        """        return zlib.crc32(",".join(counted).encode())\n""",
        "        return 0\n",
        (_DATA,),
        "a rank without a tenant's sequences would leave the others waiting",
    ),
    Fault(
        "refused-data-breaks-its-tenant",
        "rl_backend/runtime/tenants.py",
        "if tenants.begun and tenants.trains:",
        "if tenants.trains:",
        (_DATA,),
        "gradients of good passes would be lost with one refused batch",
    ),
    Fault(
        "half-of-a-failed-loss-is-a-result",
        "rl_backend/runtime/tenant_pass.py",
        "if loss is not None and not error else []",
        "if loss is not None else []",
        (f"{_REFUSALS}::test_a_loss_that_fails_on_one_rank_has_no_results_on_any",),
        "the driver could not join what ranks have of a failed loss",
    ),
]
