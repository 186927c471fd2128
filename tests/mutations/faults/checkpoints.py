"""Checkpoints: writing, committing, verifying, directories for Hugging Face."""

from __future__ import annotations

from tests.mutations.fault import Fault

_DAMAGED = "test_an_incomplete_checkpoint_is_refused_on_every_rank_before_anything_changes"

FAULTS = [
    Fault(
        "digests-not-compared",
        "rl_backend.checkpoint.training_state:require_written",
        "if found != facts:",
        "if facts is None or found.num_bytes != facts.num_bytes:",
        (_DAMAGED,),
        "a flipped bit on a disk would be trained on",
    ),
    Fault(
        "seal-not-compared",
        "rl_backend.checkpoint.manifest:SealedConfig.read_sealed",
        'if _digest(text.replace(_DIGEST.format(found.digest), _DIGEST.format(""), 1)) == found.digest:',
        'if _digest(text.replace(_DIGEST.format(found.digest), _DIGEST.format(""), 1)) is not None:',
        (_DAMAGED,),
        "a changed manifest would be believed",
    ),
    Fault(
        "one-failing-rank-is-not-heard",
        "rl_backend.checkpoint.training_state:raise_on_every_rank",
        "if found:",
        "if dist.get_rank(group) in found:",
        (
            _DAMAGED,
            "test_a_rank_that_cannot_copy_its_state_fails_the_save_on_every_rank",
        ),
        "other ranks would wait for one that has raised",
    ),
    Fault(
        "weight-version-not-loaded",
        "rl_backend.runtime.checkpoints:load_state",
        "handle.weight_version = manifest.weight_version",
        "pass",
        ("test_training_goes_on_exactly_where_it_was_on_any_number_of_ranks[2-2-False]",),
        "engines would refuse the weights of a resumed run",
    ),
    Fault(
        "random-state-not-loaded",
        "rl_backend.runtime.checkpoints:restore_random_state",
        'state = tensors.get(f"{RANDOM}{kind}.{dist.get_rank()}")',
        "state = None",
        ("test_random_state_is_each_ranks_own_and_is_restored",),
        "a resumed run would draw other numbers",
    ),
    Fault(
        "a-load-that-fails-leaves-no-mark",
        "rl_backend.runtime.checkpoints:load_state",
        'handle.damaged = f"loading {path} failed in the middle"',
        "pass",
        ("test_a_load_that_fails_in_the_middle_leaves_a_model_that_is_refused",),
        "a model of two checkpoints would train on",
    ),
    Fault(
        "pieces-of-another-row",
        "rl_backend.checkpoint.training_state:boxes",
        "yield Box((index, *box.offsets), (1, *box.sizes), box.start + index * row)",
        "yield Box((index, *box.offsets), (1, *box.sizes), box.start)",
        ("test_boxes_cover_every_span_of_a_tensor_once_and_in_order",),
        "moments would be saved under other rows",
    ),
    Fault(
        "copies-are-written-too",
        "rl_backend.checkpoint.training_state:TensorPieces.__create_write_items__",
        """
        [
            WriteItem(
                index=MetadataIndex(fqn, Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=Size(offsets), sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.whole_size,
                ),
            )
            for offsets, piece in self.pieces.items()
            if self.writes
        ]
        """,
        """
        [
            WriteItem(
                index=MetadataIndex(fqn, Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=Size(offsets), sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.whole_size,
                ),
            )
            for offsets, piece in self.pieces.items()
        ]
        """,
        ("test_a_copy_of_what_another_rank_writes_is_not_written",),
        "ranks would write one piece several times",
    ),
    Fault(
        "manifest-lists-files-of-rank-0-alone",
        "rl_backend.checkpoint.training_state:write_training_state",
        "files = {name: facts for part in parts for name, facts in sorted(part.items())}",
        "files = dict(sorted(writer.written.items()))",
        ("test_random_state_is_each_ranks_own_and_is_restored",),
        "no checkpoint of several ranks could be loaded",
    ),
    Fault(
        "latest-points-to-a-draft",
        "actors.folder.checkpoints:RunCheckpoints.commit",
        "rename_synced(draft, path)",
        """
        self._point_latest_to(path)
        rename_synced(draft, path)
        """,
        ("test_a_process_killed_anywhere_in_a_commit_leaves_the_old_or_the_new_checkpoint",),
        "latest would point to nothing after a kill",
    ),
    Fault(
        "newest-by-its-name",
        "actors.folder.checkpoints:RunCheckpoints._committed",
        "return sorted((int(match[1]), entry) for match, entry in found if match and entry.is_dir())",
        "return [(int(m[1]), e) for _, m, e in sorted((e.name, m, e) for m, e in found if m and e.is_dir())]",
        ("test_the_last_checkpoints_are_kept_and_the_newest_is_the_one_of_the_most_steps",),
        "step 100000000 would count as older than step 99999999",
    ),
    Fault(
        "one-checkpoint-too-few-kept",
        "actors.folder.checkpoints:RunCheckpoints._remove_old",
        "for _, path in self._committed()[: -self.keep_last]:",
        "for _, path in self._committed()[: -self.keep_last + 1 or None]:",
        ("test_the_last_checkpoints_are_kept_and_the_newest_is_the_one_of_the_most_steps",),
        "keep_last=1 would keep none",
    ),
    Fault(
        "drafts-not-removed",
        "actors.folder.checkpoints:RunCheckpoints.clean_up",
        "_discard(entry)",
        "pass",
        ("test_a_save_that_did_not_finish_is_no_checkpoint_and_is_removed_by_the_next_run",),
        "what a killed run has left would be in the way of the next",
    ),
    Fault(
        "files-of-a-commit-not-verified",
        "actors.folder.checkpoints:read_run_checkpoint",
        "if missing or file_facts(path / name) != facts:",
        "if missing:",
        ("test_a_damaged_checkpoint_is_refused_and_no_earlier_one_is_taken_in_its_place",),
        "a run would go on from a damaged state",
    ),
    Fault(
        "hugging-face-shard-not-emptied",
        "rl_backend.checkpoint.hf_writer:_shards",
        "if shard and size + info.nbytes > max_shard_bytes:",
        "if shard and size > max_shard_bytes:",
        ("test_shards_keep_to_their_size_and_the_index_covers_them",),
        "files would be larger than asked for",
    ),
    Fault(
        "config-keeps-its-dtype",
        "rl_backend.checkpoint.hf_writer:_with_usual_dtype.changed",
        "return {**part, **{field: usual for field in _DTYPE_FIELDS if field in part}}",
        "return {**{field: usual for field in _DTYPE_FIELDS if field in part}, **part}",
        ("test_config_says_the_dtype_that_was_written",),
        "transformers would load another dtype than was written",
    ),
    Fault(
        "tensors-of-an-export-at-the-start-of-their-file",
        "rl_backend.checkpoint.hf_writer:write_tensors",
        "stream.seek(start)",
        "stream.seek(8)",
        ("test_transformers_loads_what_was_written",),
        "tensors would overwrite each other",
    ),
    Fault(
        "tensors-that-do-not-come-are-zeros",
        "rl_backend.checkpoint.hf_writer:write_tensors",
        "if missing:",
        "if False:",
        ("test_tensors_that_are_not_those_announced_are_refused",),
        "an export that ends early would leave zeros in the place of weights",
    ),
    Fault(
        "functions-of-strangers-looked-up",
        "rl_backend.checkpoint.metadata_unpickler:_Unpickler.find_class",
        """
        if (module, name) not in _NAMES:
            raise CheckpointError.at(
                self._path, f"is refused: its {METADATA_FILE} {may_run(f'{module}.{name}')}", name=METADATA_FILE
            )
        """,
        """
        if (module, name) not in _NAMES:
            return super().find_class(module, name)
        if False:
            raise CheckpointError.at(
                self._path, f"is refused: its {METADATA_FILE} {may_run(f'{module}.{name}')}", name=METADATA_FILE
            )
        """,
        ("test_a_checkpoint_that_would_run_a_command_is_refused_by_name",),
        "a checkpoint of a stranger would run its commands",
    ),
    Fault(
        "weights-read-from-any-file",
        "rl_backend.checkpoint.metadata_unpickler:_place",
        "if file not in files or file == METADATA_FILE:",
        "if False:",
        ("test_a_checkpoint_that_would_run_a_command_is_refused_by_name[hostile_place]",),
        "a checkpoint would have files outside of its folder read",
    ),
    Fault(
        "cover-of-pieces-not-checked",
        "rl_backend.checkpoint.metadata_unpickler:_tensor",
        "if not covered:",
        "if False:",
        ("test_a_checkpoint_that_has_other_tensors_than_it_says_is_refused_by_name[false_overlap]",),
        "uninitialised memory would be exported as weights",
    ),
    Fault(
        "any-folder-exported",
        "rl_backend.checkpoint.hf_export:source_of",
        "_require_same_model(weights, read_hf_config(source), source)",
        "pass",
        ("test_a_checkpoint_chooses_no_folder_whose_files_are_exported[credentials]",),
        "a checkpoint of a stranger would choose whose files are copied",
    ),
    Fault(
        "links-out-of-the-folder-followed",
        "rl_backend.checkpoint.confined:require_inside",
        "if not found.is_relative_to(folder.resolve()):",
        "if False:",
        ("test_a_link_out_of_the_folder_is_refused_by_name",),
        "a checkpoint would have files outside of its folder read",
    ),
    Fault(
        "parents-in-names-followed",
        "rl_backend.checkpoint.confined:name_problem",
        'if ".." in parts:',
        "if False:",
        ("test_a_name_that_leads_out_of_the_folder_is_refused_unread",),
        "a manifest would have files outside of its folder read",
    ),
    Fault(
        "failed-save-keeps-its-name",
        "rl_backend.checkpoint.durable_commit:rename_synced",
        "new.rename(old)",
        "pass",
        ("test_a_save_whose_name_could_not_be_flushed_is_not_there",),
        "a save that is said to have failed would be resumed from",
    ),
    Fault(
        "buffered-bytes-not-flushed",
        "rl_backend.checkpoint.training_state:_DigestingFile.fileno",
        "self.flush()",
        "pass",
        ("test_a_file_that_is_flushed_by_its_descriptor_has_all_that_was_written",),
        "the end of a file would not be on the disk when its checkpoint gets its name",
    ),
    Fault(
        "full-disk-hidden-by-torch",
        "rl_backend.checkpoint.training_state:_DigestingFileSystem.create_stream",
        "if stream.error is not None:",
        "if False:",
        ("test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_nothing_is_left[itself]",),
        "a full disk would be told as an unexpected position",
    ),
    Fault(
        "verl-checkpoint-lost-between-two-names",
        "adapters.verl.checkpoints:found_name",
        "if path.exists() or not _old(path).exists():",
        "if True:",
        ("test_whenever_it_is_killed_the_old_or_the_new_one_is_found",),
        "a kill between two renames would lose both checkpoints",
    ),
    Fault(
        "failed-export-is-left-behind",
        "rl_backend.checkpoint.durable_commit:new_directory",
        "discard_draft(draft)",
        "pass",
        ("test_a_failure_in_the_middle_leaves_nothing_behind",),
        "hidden directories would fill the disk",
    ),
    Fault(
        "one-file-beside-an-index-of-others",
        "rl_backend.checkpoint.hf_reader:_weight_files",
        "(directory / SINGLE_FILE).is_file() and set(weight_map.values()) != {SINGLE_FILE}",
        "False",
        ("test_one_file_beside_an_index_of_others_is_refused",),
        "the trainer would read older weights than transformers",
    ),
    Fault(
        "two-copies-of-a-tensor",
        "rl_backend.checkpoint.hf_reader:HFReader._read_header",
        "name in self._files",
        "False",
        ("test_an_older_copy_of_a_tensor_in_another_file_of_the_index_is_refused",),
        "engines would answer with older copies than the trainer's",
    ),
    Fault(
        "a-check-without-the-tied-head",
        "rl_backend.runtime.registry:check_weights",
        'head == "log_probs"',
        "False",
        ("test_a_head_that_is_not_the_embeddings_is_found_before_anything_is_started",),
        "a check would pass a model that the run refuses",
    ),
    Fault(
        "surplus-tensors-accepted",
        "rl_backend.checkpoint.hf_weights:check_tensors",
        '"the model has no parameter for": surplus,',
        '"the model has no parameter for": [],',
        (
            "test_a_missing_or_surplus_expert_is_named_before_anything_is_read",
            "test_stored_buffers_that_it_names_are_not_read_and_others_are_refused",
        ),
        "weights of another model would be read in part",
    ),
    Fault(
        "saves-do-not-wait-for-each-other",
        "rl_backend.runtime.checkpoints:CheckpointWriter.save_training_state",
        "self.wait(handle)",
        "pass",
        ("test_a_second_save_leaves_what_the_first_is_still_writing",),
        "the next save would write into the buffers of one that is being written",
    ),
    Fault(
        "offloaded-part-comes-back-empty",
        "rl_backend.runtime.handle:Offload.reload",
        "_bytes(storage).copy_(host, non_blocking=True)",
        "pass",
        ("test_tensors_that_share_a_storage_move_once_and_stay_views",),
        "weights would be garbage after a trip to the host",
    ),
    Fault(
        "offload-frees-nothing",
        "rl_backend.runtime.handle:Offload.offload",
        """
        for storage, _ in moved:
            storage.resize_(0)
        """,
        "pass",
        ("test_a_part_that_leaves_frees_its_memory_and_no_other",),
        "offloading would save no memory",
    ),
    Fault(
        "moments-saved-under-each-others-name",
        "rl_backend.runtime.native.engine:_held_tensors",
        'yield from ((prefix, name, state[f"{kind}.{name}"]) for name in trained for kind, prefix in MOMENTS.items())',
        """
        pairs = tuple(zip(MOMENTS, reversed(MOMENTS.values()), strict=True))
        yield from ((prefix, name, state[f"{kind}.{name}"]) for name in trained for kind, prefix in pairs)
        """,
        ("test_a_checkpoint_has_every_tensor_under_its_own_name",),
        "another runtime would go on with the squares as means",
    ),
    Fault(
        "host-buffers-outlive-their-handle",
        "rl_backend.runtime.checkpoints:CheckpointWriter.__init__",
        "self._buffers: WeakKeyDictionary[GuardedHandle, HostBuffers] = WeakKeyDictionary()",
        "self._buffers: WeakKeyDictionary[GuardedHandle, HostBuffers] = {}",
        ("test_nothing_of_a_removed_tenant_stays_in_memory",),
        "copies of every removed tenant would stay until the runtime ends",
    ),
    Fault(
        "random-state-of-layouts-exchanged",
        "rl_backend.runtime.checkpoints:_origins",
        "source_rank(int(rank), here, saved, differs(stream))",
        "source_rank(int(rank), saved, here, differs(stream))",
        ("test_a_rank_looks_for_the_stream_of_its_replica_under_the_layout_of_the_save",),
        "in another layout ranks would go on with the dropout of other ranks",
    ),
    Fault(
        "given-config-is-not-written",
        "rl_backend.checkpoint.hf_writer:write_hf_directory",
        "(source_config if config is None else config)",
        "(source_config)",
        ("test_a_configuration_that_is_given_is_written_in_place_of_the_sources",),
        "a saved critic would be described as a language model",
    ),
    Fault(
        "lists-pass-as-objects",
        "rl_backend.checkpoint.hf_reader:_read_json_object",
        "if isinstance(content, dict):",
        "if content:",
        ("test_a_file_that_is_no_json_object_is_refused",),
        "a broken file would be an error without its name",
    ),
]
