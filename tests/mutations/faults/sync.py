"""Weights on their way to engines, and samples on their way back."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "staged-names-not-compared",
        "rl_backend.weights.staging:as_announced",
        "if found != announced:",
        "if found and announced and found[1:] != announced[1:]:",
        ("test_an_export_that_differs_from_what_it_announced_is_refused",),
        "two tensors of one shape would arrive swapped, with right digests",
    ),
    Fault(
        "surplus-tensors-of-an-export-ignored",
        "rl_backend.weights.staging:as_announced",
        "enumerate([*infos, None])",
        "enumerate(infos)",
        ("test_an_export_that_differs_from_what_it_announced_is_refused",),
        "an export longer than announced would be cut off silently",
    ),
    Fault(
        "streams-do-not-compare-names",
        "actors.sync.gpu_transports:ExportSource.__iter__",
        "as_announced(self.plan.infos, export(self.context, self.plan))",
        "zip(self.plan.infos, (weight for _, weight in export(self.context, self.plan)), strict=False)",
        ("test_a_stream_ends_before_the_first_tensor_that_is_not_the_one_announced",),
        "NCCL and CUDA IPC would load swapped tensors",
    ),
    Fault(
        "staged-digests-not-compared",
        "rl_backend.weights.staging:check_staged",
        "if changed:",
        "if len(changed) > 1:",
        ("test_every_single_byte_of_a_staged_tensor_is_covered_by_its_digest",),
        "a torn transfer would be loaded",
    ),
    Fault(
        "staged-values-not-checked",
        "rl_backend.weights.inspection:has_non_finite",
        "suspects = (~sums.isfinite()).nonzero().flatten().tolist()",
        "suspects = sums.isinf().nonzero().flatten().tolist()",
        ("test_one_bad_value_among_many_is_found",),
        "NaN weights would be served",
    ),
    Fault(
        "overflowing-sums-are-refused",
        "rl_backend.weights.inspection:has_non_finite",
        "return any(not bool(chunks[index].isfinite().all()) for index in suspects)",
        "return bool(suspects)",
        ("test_finite_values_whose_sum_overflows_are_accepted",),
        "large float16 weights would be called damaged",
    ),
    Fault(
        "last-chunk-not-checked",
        "rl_backend.weights.inspection:has_non_finite",
        "sums = torch.stack([chunk.sum() for chunk in chunks])",
        "sums = torch.stack([chunk.sum() for chunk in (chunks[:-1] or chunks)])",
        ("test_one_bad_value_among_many_is_found",),
        "a NaN at the end of a large tensor would be served",
    ),
    Fault(
        "negative-infinity-not-checked",
        "rl_backend.weights.inspection:_block_is_finite",
        """
        np.frombuffer(memory, f"i{dtype.itemsize}").max() < infinity and np.frombuffer(
            memory, f"u{dtype.itemsize}"
        ).max() < sign | infinity
        """,
        'np.frombuffer(memory, f"i{dtype.itemsize}").max() < infinity',
        ("test_one_bad_value_among_many_is_found",),
        "weights of minus infinity would be served",
    ),
    Fault(
        "last-block-not-digested",
        "rl_backend.weights.inspection:each_block",
        "[range(first, min(first + BLOCK_BYTES, nbytes)) for first in range(0, nbytes, BLOCK_BYTES)]",
        """
        [range(first, min(first + BLOCK_BYTES, nbytes)) for first in range(0, nbytes, BLOCK_BYTES)][
            : max(nbytes // BLOCK_BYTES, 1)
        ]
        """,
        ("test_a_copy_and_its_digest_cover_every_byte_around_the_ends_of_blocks",),
        "the end of a large tensor would be neither copied nor checked",
    ),
    Fault(
        "intact-by-name-alone",
        "rl_backend.weights.staging:check_staged",
        "left = [info for info in manifest.tensors if found.get(info.name) != info]",
        "left = [info for info in manifest.tensors if info.name not in found]",
        ("test_what_was_found_intact_is_not_read_again_and_anything_else_is",),
        "a tensor that was staged again would be loaded unread",
    ),
    Fault(
        "damaged-parts-count-as-intact",
        "rl_backend.weights.staging:find_intact",
        "return {info.name: info for info, one in inspections if one.finite and one.digest == info.digest}",
        "return {info.name: info for info, one in inspections if one.finite}",
        ("test_what_was_found_intact_is_not_read_again_and_anything_else_is",),
        "a byte that was torn before its part was checked would be loaded",
    ),
    Fault(
        "overlaps-not-found",
        "rl_backend.weights.staging:_check_places",
        "if any(first + size > second for (first, size), (second, _) in pairwise(ranges)):",
        "if any(first > second for (first, size), (second, _) in pairwise(ranges)):",
        ("test_a_manifest_that_does_not_fit_its_buffer_is_refused",),
        "one tensor would be written over another",
    ),
    Fault(
        "missing-weights-accepted",
        "rl_backend.weights.staging:find_mismatches",
        "name not in names and name not in in_halves and name not in kept",
        "False and name not in in_halves and name not in kept",
        ("test_every_mismatch_is_reported_by_name_at_once",),
        "an engine would keep old weights beside new ones",
    ),
    Fault(
        "half-of-a-fused-group-accepted",
        "rl_backend.weights.staging:find_mismatches",
        "0 < len(names.intersection(group)) < len(group)",
        "1 < len(names.intersection(group)) < len(group)",
        ("test_one_part_of_a_fused_group_is_named_as_such",),
        "a fused projection would hold old and new rows",
    ),
    Fault(
        "segments-of-living-processes-removed",
        "actors.wire.segment:remove_stale_segments",
        'start_time(int(match["pid"])) == match["start"]',
        "False",
        ("test_segments_of_killed_processes_are_removed_and_those_of_living_ones_are_not",),
        "one run would take another's weights away",
    ),
    Fault(
        "short-segments-are-mapped",
        "actors.wire.segment:map_segment",
        "if size < nbytes:",
        "if size < 0:",
        ("test_a_segment_that_is_not_there_or_too_short_is_refused",),
        "an engine would end with SIGBUS",
    ),
    Fault(
        "operations-out-of-order-run",
        "actors.train.order:OperationSequence.start",
        "if header.number != self.started + 1:",
        "if header.number <= self.started:",
        ("test_an_operation_out_of_order_is_refused",),
        "a rank that lost an operation would meet the others' next one",
    ),
    Fault(
        "operations-behind-a-failure-run",
        "actors.train.order:OperationSequence.start",
        "if header.submitter in self._failed:",
        "if False:",
        ("test_nothing_runs_after_a_failure_until_the_driver_has_seen_it",),
        "a step would follow a pass that failed",
    ),
    Fault(
        "failure-of-one-thread-stops-the-others",
        "actors.train.order:OperationSequence.start",
        "self.started, self._submitter = header.number, header.submitter",
        "self.started, self._submitter = header.number, 0",
        ("test_a_failure_stops_the_operations_of_its_own_thread_alone",),
        "a tenant whose pass fails would end the runs of the others",
    ),
    Fault(
        "another-driver-operates-the-group",
        "actors.train.order:OperationLedger.begin",
        """
        if driver.id != self._owner.id:
            return self._owner
        """,
        "pass",
        ("test_the_ledger_numbers_one_drivers_operations_and_tells_others_who_has_the_group",),
        "two drivers would interleave collectives",
    ),
    Fault(
        "an-export-goes-on-where-a-rank-has-closed-it",
        "rl_backend.runtime.export_stream:_all_go_on",
        "dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)",
        "dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)",
        ("test_export.py::test_closing_early_on_one_rank_ends_the_export_on_all[None-1]",),
        "ranks would gather without one of them",
    ),
    Fault(
        "a-closed-export-leaves-its-bucket",
        "rl_backend.runtime.export_stream:start_stream.stream",
        "for _ in left:",
        "for _ in ():",
        ("test_a_stream_closed_early_finishes_the_bucket_it_is_in_and_starts_no_other",),
        "the other ranks would wait in the rest of a bucket",
    ),
    Fault(
        "buckets-over-their-budget",
        "rl_backend.runtime.export_stream:plan_buckets",
        "if not buckets or buckets[-1][-1].dtype != item.dtype or filled + item.nbytes > byte_budget:",
        "if not buckets or buckets[-1][-1].dtype != item.dtype or filled > byte_budget:",
        ("test_buckets_keep_the_order_the_budget_and_one_dtype",),
        "an export would gather more than asked for",
    ),
    Fault(
        "staleness-of-the-newest-token",
        "actors.collect.collector:WeightVersions.age",
        "return step - 1 - min(self._step_of_version[version] for version in versions)",
        "return step - 1 - max(self._step_of_version[version] for version in versions)",
        ("test_a_sample_of_several_versions_is_as_old_as_its_oldest_token",),
        "responses that began with old weights would count as fresh",
    ),
    Fault(
        "stale-samples-are-trained-on",
        "actors.collect.collector:Collector.collect",
        'if age > config.max_staleness and config.stale_samples == "drop":',
        'if age > config.max_staleness + 1 and config.stale_samples == "drop":',
        ("test_samples_that_are_too_old_are_left_out",),
        "max_staleness would be one more than asked for",
    ),
    Fault(
        "rewards-of-other-samples",
        "actors.collect.prompts:PromptSource.scored_groups",
        "yield _Group(batch.prompts[rows], batch.samples[rows], scores[rows])",
        "yield _Group(batch.prompts[rows], batch.samples[rows], scores[:size])",
        ("test_a_batch_is_scored_and_keeps_its_order",),
        "all groups would have the first one's rewards",
    ),
    Fault(
        "a-push-does-not-wait-for-samples",
        "actors.collect.stream:BatchStream.between_batches",
        """
        with self._sampling_now:
            yield
        """,
        "yield",
        ("test_a_push_waits_for_whichever_batch_is_being_sampled",),
        "a batch would be sampled from two versions",
    ),
    Fault(
        "a-resumed-stream-draws-the-prompts-again",
        "actors.collect.stream:BatchStream._go_to",
        """
        for _ in range(position.taken):
            next(self._batches)
        """,
        "pass",
        ("test_a_stream_that_goes_on_draws_no_sample_again_and_gives_what_the_other_would_have",),
        "a resumed run would see its first prompts twice",
    ),
    Fault(
        "samples-of-every-batch-alike",
        "actors.collect.stream:SampleStream._draw",
        "self._seed, number,",
        "self._seed, 0,",
        ("test_every_batch_has_seeds_of_its_own",),
        "a prompt that comes again would get the same responses",
    ),
    Fault(
        "nccl-chosen-for-two-members-on-one-gpu",
        "actors.sync.push:choose_transport",
        "if not devices_of_two(plan, rollout):",
        "if True:",
        ("test_nccl_is_chosen_only_where_each_member_has_a_gpu_of_its_own",),
        "NCCL would refuse the group at the first push",
    ),
    Fault(
        "push-begins-before-the-weights-are-there",
        "actors.sync.gpu_transports:send_stream",
        "torch.cuda.current_stream().synchronize()",
        "pass",
        ("test_a_push_is_sent_when_what_trains_has_been_computed",),
        "engines could be sent weights of half a step",
    ),
    Fault(
        "checksums-of-whole-tensors",
        "rl_backend.weights.inspection:device_checksum",
        "for part in flat.split(CHECKSUM_BYTES // (2 if words else 8)) if flat.numel() else ():",
        "for part in flat.split(flat.numel()) if flat.numel() else ():",
        ("test_a_checksum_takes_a_bounded_amount_of_memory",),
        "a push would take twice its largest tensor beside the weights",
    ),
    Fault(
        "cuda-errors-leave-a-group-usable",
        "actors.train.outcome:breaks_process_group",
        "if isinstance(error, dist.DistError | torch.AcceleratorError):",
        "if isinstance(error, dist.DistError):",
        ("test_an_error_that_stays_breaks_the_group",),
        "every later call would wait for the rank whose device is lost",
    ),
    Fault(
        "transfer-engine-before-is-not-shut-down",
        "actors.rollout.vllm.worker:SwitchingWeightTransferEngine.parse_init_info",
        """
        if self._active is not None:
            self._active.shutdown()
        self._active = engine_class(self.config, self.vllm_config, self.device, self.model)
        """,
        "self._active = engine_class(self.config, self.vllm_config, self.device, self.model)",
        ("test_a_worker_that_receives_another_way_ends_the_way_before",),
        "communicators and mappings of earlier pushes would stay",
    ),
    Fault(
        "cuda-ipc-for-engines-without-ranks",
        "actors.sync.push:choose_transport",
        "all(set(info.device_ids) <= set(plan.device_ids) for info in infos)",
        "any(set(info.device_ids) <= set(plan.device_ids) for info in infos)",
        ("test_nccl_is_chosen_only_where_each_member_has_a_gpu_of_its_own",),
        "an engine on a GPU without a rank would be sent handles of memory of another one",
    ),
    Fault(
        "forgets-whatever-segment-is-mapped",
        "actors.rollout.engine.weights:WeightReceiver.forget_segment",
        "self._mapped is not None and self._mapped.path == path",
        "self._mapped is not None",
        ("test_another_pushs_segment_is_forgotten_without_what_was_verified_since",),
        "a push would fail because another model's WeightSync is closed",
    ),
    Fault(
        "engines-lost-while-turns-end-are-not-told",
        "actors.sync.push:WeightSync._load_staged",
        'lost | rollout.call("load", version)',
        'rollout.call("load", version)',
        ("test_an_engine_that_is_lost_on_the_way_is_told_and_the_others_serve_the_new_weights",),
        "a push that lost an engine would succeed",
    ),
    Fault(
        "checked-parts-of-another-push-count",
        "actors.rollout.engine.weights:WeightReceiver.verify",
        "intact = self._intact if push == self._push else {}",
        "intact = self._intact",
        ("test_parts_that_were_checked_already_are_read_once_if_they_are_the_pushs_own",),
        "weights that were overwritten since would be loaded unread",
    ),
]
