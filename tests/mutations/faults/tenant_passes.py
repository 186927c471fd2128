"""Passes of LoRA tenants: how sequences are cut, products of adapters, what is refused, a loss that fails."""

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
        "rl_backend.runtime.tenants.passes:PassTenants.fingerprint",
        'return zlib.crc32(",".join(counted).encode())',
        "return 0",
        (_DATA,),
        "a rank without a tenant's sequences would leave the others waiting",
    ),
    Fault(
        "refused-data-breaks-its-tenant",
        "rl_backend.runtime.tenants.tenants:_break_trained",
        "if tenants.begun and tenants.trains:",
        "if tenants.trains:",
        (_DATA,),
        "gradients of good passes would be lost with one refused batch",
    ),
    Fault(
        "half-of-a-failed-loss-is-a-result",
        "rl_backend.runtime.tenants.passes:results_of_tenants",
        "own = loss.results.get(key, []) if loss is not None and not error else []",
        "own = loss.results.get(key, []) if loss is not None else []",
        ("test_a_loss_that_fails_on_one_rank_has_no_results_on_any",),
        "the driver could not join what ranks have of a failed loss",
    ),
    Fault(
        "clamped-experts-second-product-not-padded",
        "rl_backend.primitive.experts:ClampedExperts.forward",
        "product(hidden, self.down_proj.transpose(1, 2), tokens.counts)",
        "grouped_linear(hidden, self.down_proj.transpose(1, 2), tokens.counts)",
        ("test_rows_of_clamped_experts_keep_their_bits_beside_others",),
        "a tenant over gpt-oss would have other last bits beside others",
    ),
    Fault(
        "experts-adapters-gradients-end-at-the-layer",
        "rl_backend.primitive.experts:_AdaptedExperts.backward",
        "work.add_gradients(grad_x, x, grad, layers[expert])",
        "work.add_gradients(grad_x.clone(), x, grad, layers[expert])",
        ("test_adapters_of_experts_have_the_outputs_and_gradients_of_autograd",),
        "layers below would lack the gradient through adapters of experts",
    ),
    Fault(
        "gradients-of-the-first-work-only",
        "rl_backend.primitive.adapters:_AdaptedLinear.backward",
        "for work in ctx.work:",
        "for work in ctx.work[:1]:",
        ("test_each_adapter_gives_the_bits_that_it_gives_alone",),
        "only the first tenant of a micro-batch would train",
    ),
    Fault(
        "labels-of-the-batch-are-overwritten",
        "rl_backend.primitive.value_head:labels_without_values",
        "labels.clone() if valued else labels",
        "labels.contiguous() if valued else labels",
        ("test_rows_with_values_have_no_labels_and_those_of_the_batch_stay",),
        "a second pass over a batch would have lost its labels",
    ),
    Fault(
        "rows-are-tried-in-float32-alone",
        "rl_backend.primitive.adapters:_tried",
        "x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)",
        "x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)",
        ("test_the_dtype_whose_rows_depend_on_others_is_found",),
        "equal bits would be claimed in bfloat16 where only those of float32 are equal",
    ),
    Fault(
        "embedding-adapter-works-to-the-end",
        "rl_backend.primitive.adapters:_AdaptedEmbedding.forward",
        "rows = slice(run.start, run.stop)",
        "rows = slice(run.start, len(tokens))",
        ("test_tokens_of_an_embedding_have_the_products_and_gradients_of_their_own_adapter",),
        "tokens of a tenant would have the embeddings of those before it too",
    ),
    Fault(
        "repeated-tokens-count-once",
        "rl_backend.primitive.adapters:_AdaptedEmbedding.backward",
        "factors.grad_a.index_add_(1, own, grad_narrow.to(factors.grad_a.dtype).t())",
        "factors.grad_a[:, own] += grad_narrow.to(factors.grad_a.dtype).t()",
        ("test_tokens_of_an_embedding_have_the_products_and_gradients_of_their_own_adapter",),
        "a token that comes twice would train as one that comes once",
    ),
    Fault(
        "head-adapter-learns-from-what-it-dropped",
        "rl_backend.primitive.adapters:Narrowed.backward",
        "_add_product(factors.grad_a, scaled.t(), dropped(x, ctx.draw, factors))",
        "_add_product(factors.grad_a, scaled.t(), x)",
        ("test_what_an_adapter_of_the_head_narrows_has_the_gradients_of_autograd",),
        "gradients of a head's adapter would not be those of what it computed",
    ),
]
