"""Faults in compiled layers."""

from tests.mutations.fault import Fault

_BITS = "test_compiled_code_attends_with_the_same_bits_forward_and_backward"
_LAYOUTS = "test_compiled_layers_train_as_others_do"

FAULTS = [
    Fault(
        "compiled-code-forgets-that-runs-continue-each-other",
        "rl_backend.primitive.attention:Segments.hidden",
        "tree = None if self.tree is None else PrefixTree((), (), ())",
        "tree = None",
        (f"{_BITS}[tree-False]",),
        "compiled layers would show answers the prompts of others",
    ),
    Fault(
        "compiled-code-takes-narrow-gradients-for-wide-ones",
        "rl_backend.primitive.cpu_attention:_like_gradients",
        "return *_narrowed(_unfilled_gradients(query, key, value), query, key, value), of_sinks",
        "return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks",
        ("test_torch_finds_the_operations_as_they_are_declared[sequences-float64]",),
        "generated code would read gradients of latent attention's values from the wrong places",
    ),
    Fault(
        "lengths-of-rows-known-to-compiled-code",
        "rl_backend.model.compiled:_run",
        "torch._dynamo.mark_dynamic(tensor, 0)",
        "pass",
        ("test_all_layers_and_lengths_have_one_graph_for_training_and_one_for_outputs",),
        "layers would be compiled again",
    ),
    Fault(
        "compiled-gather-does-not-add-gradients-up",
        "rl_backend.parallel.collectives:RankOperators.all_gather",
        '"gather" if sum_gradients else "gather same"',
        '"gather same"',
        (f"{_LAYOUTS}[tp2]",),
        "what other ranks computed would have no gradient",
    ),
    Fault(
        "tenants-over-compiled-layers",
        "rl_backend.runtime.native.build:build_handle",
        "if adaptable and native.compile:",
        "if False:",
        ("test_a_model_for_tenants_or_without_a_part_that_compiles_and_a_machine_without_a_compiler_are_refused",),
        "adapters would be left out of compiled layers",
    ),
    Fault(
        "a-read-for-each-loss-of-a-tenant",
        "rl_backend.runtime.tenants.passes:LossOfTenants.__call__",
        "None if loss is None else loss.detach()",
        "None if loss is None else torch.tensor(float(loss.detach()))",
        ("test_a_micro_batch_stays_within_its_budget_however_many_sequences_it_has[tenants]",),
        "the host would wait for the device after the forward pass of every micro-batch",
    ),
    Fault(
        "positions-are-waited-for",
        "rl_backend.contracts.batch:PackedBatch.position_ids",
        "return torch.cat([torch.arange(length) for length in self.seq_lens.tolist()]).to(self.device, non_blocking=True)",
        "return torch.cat([torch.arange(length) for length in self.seq_lens.tolist()]).to(self.device)",
        (
            "test_a_micro_batch_stays_within_its_budget_however_many_sequences_it_has[dense]",
            "test_a_micro_batch_stays_within_its_budget_however_many_sequences_it_has[bridge, dense]",
        ),
        "the host would wait for all that the device has to do, before every micro-batch",
    ),
    Fault(
        "angles-of-every-layer",
        "rl_backend.primitive.rope:Rotations.of",
        "if rotary not in self._known:",
        "if True:",
        ("test_a_micro_batch_stays_within_its_budget_however_many_sequences_it_has[dense]",),
        "every layer would launch the kernels of the same angles",
    ),
    Fault(
        "counts-of-experts-are-read-on-a-gpu",
        "rl_backend.primitive.grouped_linear:_has_kernel",
        "return aligned and torch.cuda.get_device_capability(x.device)[0] in _KERNEL_CAPABILITIES",
        "return False",
        ("test_a_primitive_runs_on_a_faked_gpu_forward_and_backward[grouped product]",),
        "every layer of a mixture would wait for the device",
    ),
]
