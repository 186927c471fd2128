"""Cutting models and tokens over ranks, and putting them together again."""

from __future__ import annotations

from tests.mutations.fault import Fault

_DENSE = "test_dense_layouts_train_as_one_rank"
_MIXTURES = "test_mixtures_of_experts_train_as_on_one_rank"
_FAMILIES = "test_families_train_in_every_layout_as_on_one_rank"
_EXPERTS = "test_experts_on_several_ranks_give_what_one_rank_gives"
_CONTEXT = "test_context_parallel_ranks_give_the_outputs_and_gradients_of_one"

FAULTS = [
    Fault(
        "gather-takes-its-rows-of-an-unreduced-gradient",
        "rl_backend.parallel.collectives:all_gather",
        "backward = partial(_scattered if sum_gradients else _own_rows, group=group)",
        "backward = partial(_own_rows, group=group)",
        (f"{_DENSE}[2-ranks-tp2]",),
        "what other ranks computed would have no gradient",
    ),
    Fault(
        "every-rank-adds-the-bias",
        "rl_backend.parallel.tensor:TensorParallel.row",
        "counted = float(self.rank == 0)",
        "counted = 1.0",
        (f"{_FAMILIES}[llama with all biases, a vocabulary that tp does not divide]",),
        "an output bias would count once for each tensor-parallel rank",
    ),
    Fault(
        "copied-parameters-not-summed",
        "rl_backend.parallel.tensor:_to_local",
        "Partial() if partial and placement.is_replicate() else placement",
        "placement",
        (f"{_DENSE}[2-ranks-tp2]",),
        "norms would be trained on one rank's tokens",
    ),
    Fault(
        "every-rank-takes-the-first-key-head",
        "rl_backend.parallel.tensor:TensorParallel._head",
        "head, rows = self.rank * heads // self.size, features // heads",
        "head, rows = 0, features // heads",
        (
            f"{_FAMILIES}[qwen2 with biases of queries, keys and values that tp=4 copies]",
            f"{_DENSE}[4-ranks-tp4]",
        ),
        "queries would attend to another head's keys",
    ),
    Fault(
        "words-of-other-ranks-are-looked-up",
        "rl_backend.parallel.tensor:TensorParallel.vocabulary.look_up",
        "return forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0.0)",
        "return forward(rows.masked_fill(elsewhere, 0))",
        (f"{_DENSE}[2-ranks-tp2]",),
        "embeddings of other ranks' words would add this rank's first row",
    ),
    Fault(
        "rows-of-the-first-rank-for-all",
        "rl_backend.runtime.native.forward_backward:lay_out.share",
        "torch.tensor_split(values, groups.tp_group.size())[groups.tp_group.rank()]",
        "torch.tensor_split(values, groups.tp_group.size())[0]",
        (
            "test_router_losses_do_not_depend_on_the_layout[2-ranks-tp2]",
            "test_every_layout_replays_what_one_rank_recorded[native tp2]",
        ),
        "tokens would take the routes of another rank's",
    ),
    Fault(
        "context-chunks-not-balanced",
        "rl_backend.parallel.context:lay_out_tokens",
        "first_chunks = [cp_rank] if cp_rank == cp_size - 1 else [cp_rank, 2 * cp_size - 1 - cp_rank]",
        "first_chunks = [cp_rank] if cp_rank == cp_size - 1 else [cp_rank, cp_size + cp_rank]",
        ("test_every_token_is_on_one_rank_and_places_finds_it",),
        "tokens would not be where the layout says",
    ),
    Fault(
        "context-keys-end-one-chunk-early",
        "rl_backend.parallel.context:lay_out_tokens",
        "key_lens = first_queries + query_lens",
        "key_lens = first_queries + query_lens // 2",
        ("test_the_keys_of_a_segment_are_its_sequence_up_to_its_last_query",),
        "tokens would not see those just before them",
    ),
    Fault(
        "context-gradients-of-keys-not-reduced",
        "rl_backend.parallel.context:gather_keys",
        "return all_gather(rows, group, sum_gradients=True).index_select(0, segments.key_index)",
        "return all_gather(rows, group, sum_gradients=False).index_select(0, segments.key_index)",
        (f"{_CONTEXT}[grouped queries-2]",),
        "keys would be trained by this rank's queries alone",
    ),
    Fault(
        "context-outputs-in-the-order-of-the-ranks",
        "rl_backend.parallel.context:gather_outputs",
        "return all_gather(local, group, sum_gradients=False).index_select(0, layout.places)",
        "return all_gather(local, group, sum_gradients=False)[: len(layout.places)]",
        (f"{_DENSE}[2-ranks-cp2]",),
        "a loss would see log-probs of other tokens",
    ),
    Fault(
        "positions-count-on-over-chunks",
        "rl_backend.parallel.context:lay_out_tokens",
        "position_ids = _ranges(first_queries, query_lens)",
        "position_ids = _ranges(torch.zeros_like(first_queries), query_lens)",
        ("test_every_token_is_on_one_rank_and_places_finds_it",),
        "each chunk would begin at position 0",
    ),
    Fault(
        "experts-of-the-wrong-rank",
        "rl_backend.parallel.expert:AllToAllDispatcher.__call__",
        "counts = order.counts.view(self.ep_size, -1).repeat_interleave(self.etp_size, 0)",
        "counts = order.counts.view(self.ep_size, -1).roll(1, 0).repeat_interleave(self.etp_size, 0)",
        (f"{_EXPERTS}[2-1-different numbers]",),
        "tokens would go to another rank's experts",
    ),
    Fault(
        "expert-rows-go-back-as-they-came",
        "rl_backend.parallel.expert:AllToAllDispatcher.__call__.combine",
        "results = sum_rows(results, local.tokens, local.places)",
        "results = results.clone()",
        (f"{_EXPERTS}[2-1-different numbers]",),
        "results would belong to other tokens",
    ),
    Fault(
        "all-to-all-without-a-gradient",
        "rl_backend.parallel.collectives:all_to_all_rows",
        "exchanged: Tensor = _Collective.apply(x, forward, backward)",
        "exchanged: Tensor = _Collective.apply(x, forward, lambda grad: backward(grad).zero_())",
        ("test_rows_go_to_the_ranks_they_are_for_and_their_gradients_come_back",),
        "tokens on other ranks would have no gradient",
    ),
    Fault(
        "experts-divided-by-their-own-ranks",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "module.set_gradient_divide_factor(float(groups.dp_size))",
        "module.set_gradient_divide_factor(float(mesh.size()))",
        (
            f"{_MIXTURES}[2-ranks-ep2]",
            f"{_DENSE}[2-ranks-cp2]",
        ),
        "gradients would be too large or too small by ep or cp",
    ),
    Fault(
        "gradients-of-context-ranks-averaged",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "if mesh.size() != groups.dp_size:",
        "if False:",
        (f"{_DENSE}[2-ranks-cp2]",),
        "context-parallel ranks would be averaged over instead of added up",
    ),
    Fault(
        "parameters-stay-in-float32",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "dtype = torch.float32 if module in as_they_are else param_dtype",
        "dtype = torch.float32",
        ("test_a_forward_only_handle_gives_the_outputs_of_a_trained_one_beside_it",),
        "param_dtype would be accepted and ignored",
    ),
    Fault(
        "recomputation-ignored",
        "rl_backend.model.decoder:parallelize",
        "checkpoint_layers(units, config.activation_checkpointing)",
        "pass",
        ("test_every_layer_is_recomputed_once[1f1b]",),
        "activation_checkpointing would be accepted and ignored",
    ),
    Fault(
        "selective-recomputes-attention",
        "rl_backend.model.decoder:_selective",
        "str(operation) in ATTENDS or (operation in PRODUCTS and done[context.is_recompute] % 2 == 0)",
        "operation in PRODUCTS and done[context.is_recompute] % 2 == 0",
        ("test_what_is_kept_changes_no_bit_and_what_is_recomputed_is_as_said[dense]",),
        "attention, which grows with the square of the length, would run again",
    ),
    Fault(
        "selective-keeps-every-product",
        "rl_backend.model.decoder:_selective",
        "operation in PRODUCTS and done[context.is_recompute] % 2 == 0",
        "operation in PRODUCTS",
        (
            "test_what_is_kept_changes_no_bit_and_what_is_recomputed_is_as_said[dense]",
            "test_activations_are_what_the_allocator_says[selective]",
        ),
        "selective checkpointing would keep twice as much as it says",
    ),
    Fault(
        "copies-counted-on-every-rank",
        "rl_backend.parallel.shards:ShardLayout.counts",
        "return not any(place for mesh_dim, place in enumerate(coordinate) if mesh_dim not in cut)",
        "return True",
        ("test_norm_and_zeros_are_one_ranks_and_one_bad_gradient_stops_all[dense-4-ranks-tp4]",),
        "norms of layouts with copies would be too large",
    ),
    Fault(
        "last-shard-as-long-as-the-others",
        "rl_backend.parallel.shards:chunk",
        "return slice(first, min(first + size, whole.stop))",
        "return slice(first, first + size)",
        ("test_every_rank_knows_what_each_rank_holds",),
        "sizes that ranks do not divide would be read beyond their end",
    ),
    Fault(
        "weight-put-together-in-the-wrong-order",
        "rl_backend.runtime.native.export:_follows_ranks",
        """
        [places[part.rank] for part in parts] == list(range(len(parts))) and set(starts) == {
            starts[0]
        } and rows == sorted(rows) and all(part.shape[1:] == weight.shape[1:] for part in parts) and all(
            part.numel == parts[0].numel for part in parts[:-1]
        )
        """,
        """
        [places[part.rank] for part in parts] == list(range(len(parts))) and set(starts) == {starts[0]} and all(
            part.shape[1:] == weight.shape[1:] for part in parts
        ) and all(part.numel == parts[0].numel for part in parts[:-1])
        """,
        ("test_tensors_are_gathered_whole_and_little_else_is_received",),
        "an export would have its blocks of rows swapped",
    ),
    Fault(
        "packed-experts-all-the-first",
        "rl_backend.runtime.native.export:sharded_weights",
        "weights.append(ShardedWeight(stored, shape, exported, (), tensor, place))",
        "weights.append(ShardedWeight(stored, shape, exported, (), tensor, (0,) * len(place)))",
        ("test_packed_experts_are_exported_as_the_directory_holds_them[mixtral-32768-1]",),
        "every expert would be exported as the first",
    ),
    Fault(
        "the-host-s-collectives-wait-as-they-like",
        "rl_backend.parallel.groups:_open",
        "host_group = dist.new_group(backend=backend, timeout=timeout)",
        "host_group = dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)",
        ("test_all_collectives_wait_as_long_for_a_slow_rank_as_the_configuration_says",),
        "a rank that hangs in a save would be waited for half an hour, whatever collective_timeout says",
    ),
    Fault(
        "packed-parts-counted-from-zero",
        "rl_backend.runtime.native.export:_rectangles",
        "range(part.start, part.stop)",
        "range(part.stop - part.start)",
        ("test_a_tensor_that_is_packed_in_a_parameter_has_its_own_place_parts_and_dtype",),
        "experts of the second rank would be exported as those of the first",
    ),
    Fault(
        "receive-reads-beyond-count",
        "actors.cluster.tcp_proxy:_receive",
        "connection.recv(count - len(received))",
        "connection.recv(count)",
        ("test_what_follows_a_message_is_left_to_read",),
        "the beginning of the next message would be lost",
    ),
]
