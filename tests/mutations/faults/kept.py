"""Weights that are not trained: left unread, copied, left out of pushes; and weights that are exported in float32."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "every-surplus-tensor-kept",
        "rl_backend.checkpoint.hf_weights:check_tensors",
        "surplus = [name for name in unread if not name.startswith(kept)]",
        "surplus = [name for name in unread if not kept]",
        ("test_tensors_that_the_family_does_not_keep_are_still_refused",),
        "a model would train without a part that its directory has, and nobody would know",
    ),
    Fault(
        "kept-weights-without-an-index",
        "rl_backend.checkpoint.hf_writer:write_hf_directory",
        '"weight_map": weight_map,',
        '"weight_map": {info.name: weight_map[info.name] for info in infos},',
        ("test_an_exported_model_is_the_one_that_its_run_saves",),
        "transformers and vLLM would not find what was kept",
    ),
    Fault(
        "config-written-anew",
        "rl_backend.checkpoint.hf_writer:write_hf_directory",
        "if new_config == source_config:",
        "if False:",
        ("test_a_model_that_is_saved_before_it_is_trained_is_its_source_byte_for_byte",),
        "config.json would change where nothing had to",
    ),
    Fault(
        "dtype-of-a-nested-model-stays",
        "rl_backend.checkpoint.hf_writer:_with_usual_dtype",
        'written["text_config"] = changed(text)',
        "pass",
        ("test_of_config_json_only_the_dtype_of_the_language_model_changes",),
        "vLLM would serve a released model in another dtype than was saved",
    ),
    Fault(
        "usual-dtype-counts-what-is-kept",
        "rl_backend.checkpoint.hf_writer:write_hf_directory",
        "new_config = _with_usual_dtype(described, infos)",
        "new_config = _with_usual_dtype(described, kept_infos or infos)",
        ("test_a_model_that_is_saved_before_it_is_trained_is_its_source_byte_for_byte",),
        "a large vision tower would decide the dtype of the language model",
    ),
    Fault(
        "kept-weights-of-another-shape",
        "rl_backend.checkpoint.kept_weights:open_kept",
        "name not in reader.infos or reader.infos[name].shape != shape",
        "name not in reader.infos",
        ("test_a_source_that_lost_what_is_kept_is_refused_by_the_names",),
        "a model would be saved with parts of another one",
    ),
    Fault(
        "checkpoint-forgets-what-is-kept",
        "rl_backend.runtime.checkpoints:training_manifest",
        "kept=dict(handle.kept),",
        "",
        ("test_an_exported_model_is_the_one_that_its_run_saves",),
        "an exported model would lack its vision tower",
    ),
    Fault(
        "a-push-may-leave-out-anything",
        "rl_backend.weights.staging:find_mismatches",
        "name not in kept",
        "not kept",
        ("test_a_push_may_leave_out_what_its_trainer_keeps_and_nothing_else",),
        "an engine of a released model would serve old weights beside new ones",
    ),
    Fault(
        "text-models-under-nested-names",
        "rl_backend.checkpoint.hf_reader:own_name",
        "if model_type in _NESTED_TYPES and name.startswith(_NESTED):",
        "if False and name.startswith(_NESTED):",
        ("test_a_text_model_is_read_under_its_own_names",),
        "a model that was tuned with transformers could not be trained further",
    ),
    Fault(
        "decay-pushed-in-bfloat16",
        "rl_backend.contracts.weights:export_dtype",
        "return torch.promote_types(dtype, torch.float32) if in_float32 else dtype",
        "return dtype",
        ("test_weights_that_are_computed_with_in_float32_are_announced_and_sent_in_it",),
        "an engine would compute with another decay than the trainer",
    ),
    Fault(
        "images-rendered-as-text",
        "rl_backend.data.chat_template:require_text",
        "if found is not None:",
        "if False:",
        ("test_messages_with_media_are_refused_by_the_part",),
        "a model would train on tokens that stand for images which it never sees",
    ),
]
