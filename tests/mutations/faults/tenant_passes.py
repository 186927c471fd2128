"""Passes of LoRA tenants: how sequences are cut, what is refused, and results of a loss that fails."""

from __future__ import annotations

from tests.mutations.fault import Fault

_DATA = "test_refused_data_leaves_gradients_and_dropout_as_they_were_on_every_rank"

FAULTS = [
    Fault(
        "column-of-a-tenant-behind-its-later-ones",
        "rl_backend.data.balance:plan_tenants",
        "filled.insert(source + 1, [filled[source].pop()])",
        "filled.append([filled[source].pop()])",
        ("test_a_column_that_moves_to_make_a_multiple_keeps_its_tenants_order",),
        "a tenant's gradients would be added up in an order that depends on who is beside it",
    ),
    Fault(
        "tenants-of-a-pass-not-compared-between-ranks",
        "rl_backend.runtime.tenant_pass:PassTenants.fingerprint",
        'return zlib.crc32(",".join(counted).encode())',
        "return 0",
        (_DATA,),
        "a rank without a tenant's sequences would leave the others waiting",
    ),
    Fault(
        "refused-data-breaks-its-tenant",
        "rl_backend.runtime.tenants:TenantRuntime._break_trained",
        "if tenants.begun and tenants.trains:",
        "if tenants.trains:",
        (_DATA,),
        "gradients of good passes would be lost with one refused batch",
    ),
    Fault(
        "half-of-a-failed-loss-is-a-result",
        "rl_backend.runtime.tenant_pass:results_of_tenants",
        "own = loss.results.get(key, []) if loss is not None and not error else []",
        "own = loss.results.get(key, []) if loss is not None else []",
        ("test_a_loss_that_fails_on_one_rank_has_no_results_on_any",),
        "the driver could not join what ranks have of a failed loss",
    ),
]
