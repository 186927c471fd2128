"""Models with recurrent states: adapters of both mixers, plans, comparisons and roles of verl."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "numbers-left-over-by-vectors",
        "rl_backend.primitive.activation:by_whole_vectors.of_rows",
        "return function(F.pad(x, (0, missing)))[..., :features]",
        "return function(x)",
        ("test_a_row_has_the_bits_that_it_has_alone",),
        "a tenant's gates and decays would depend on how many tokens others have",
    ),
    Fault(
        "narrow-products-not-padded",
        "rl_backend.primitive.adapters:_with_enough_columns",
        "return F.pad(x, (0, missing)) if missing > 0 else x",
        "return x",
        ("test_rows_of_narrow_products_do_not_depend_on_others",),
        "the gate of shared experts would depend on how many tokens others have",
    ),
    Fault(
        "gate-of-shared-experts-without-adapters",
        "rl_backend.runtime.native.adapters:_adaptable_layers",
        "if block.shared_expert_gate is not None:",
        "if False:",
        ("test_both_mixers_and_shared_experts_are_adapted[qwen3_5_moe]",),
        "the gate would stay as it was, and a tenant that names it be refused",
    ),
    Fault(
        "rows-of-another-rank-for-the-gate",
        "rl_backend.primitive.adapters:runs_of_share",
        "first, found = rank * num_rows, []",
        "first, found = 0, []",
        ("test_lora_hybrids.py::test_tenants_train_in_every_layout_as_on_one_rank[qwen3_next-tp2]",),
        "a tensor-parallel rank would apply a tenant's gate to the tokens of another tenant",
    ),
    Fault(
        "states-in-the-dtype-of-an-engine",
        "rl_backend.model.mixers.deltanet:DeltaNetSpec.cache_bytes",
        "states = self.num_value_heads * self.key_dim * self.value_dim * torch.float32.itemsize",
        "states = self.num_value_heads * self.key_dim * self.value_dim * itemsize",
        ("test_a_sequence_takes_float32_states_and_keys_and_values_of_few_layers",),
        "a plan would say that an engine holds twice as many sequences as it does",
    ),
    Fault(
        "nested-model-under-its-names-in-memory",
        "rl_backend.lab.parity.transformers_side:_path_in_files",
        'return lambda name: nested + name.removeprefix(inside) if name.startswith(f"{inside}.") else name',
        'return lambda name: name if name.startswith(f"{inside}.") else name',
        ("test_a_released_model_trains_as_transformers_does[lora]",),
        "a released Qwen3.5 could not be compared with transformers",
    ),
    Fault(
        "sizes-of-the-outer-configuration",
        "adapters.verl.options.megatron:text_config",
        'return getattr(hf_config, "text_config", None) or hf_config',
        "return hf_config",
        ("test_every_role_takes_either_directory[nested-nested-actor]",),
        "verl's roles would take a released mixture for a dense model",
    ),
]
