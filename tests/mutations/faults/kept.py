"""Weights that are not trained: left unread, copied, left out of pushes; and weights that are exported in float32."""

from __future__ import annotations

from tests.mutations.fault import Fault

_WRITER = "rl_backend/checkpoint/hf_writer.py"
_KEPT = "tests/unit/rl_backend/runtime/test_kept_weights.py"
_EXPORT = "tests/unit/rl_backend/cli/test_export_kept.py"
_DTYPES = "tests/unit/rl_backend/runtime/test_export_dtypes.py"
_MEDIA = "tests/unit/rl_backend/data/test_data_files.py"

FAULTS = [
    Fault(
        "every-surplus-tensor-kept",
        "rl_backend/checkpoint/hf_weights.py",
        "    surplus = [name for name in unread if not name.startswith(kept)]\n",
        "    surplus = [name for name in unread if not kept]\n",
        (f"{_KEPT}::test_tensors_that_the_family_does_not_keep_are_still_refused",),
        "a model would train without a part that its directory has, and nobody would know",
    ),
    Fault(
        "kept-weights-without-an-index",
        _WRITER,
        '"weight_map": weight_map}',
        '"weight_map": {info.name: weight_map[info.name] for info in infos}}',
        (f"{_EXPORT}::test_an_exported_model_is_the_one_that_its_run_saves",),
        "transformers and vLLM would not find what was kept",
    ),
    Fault(
        "config-written-anew",
        _WRITER,
        "            if new_config == source_config:\n",
        "            if False:\n",
        (f"{_KEPT}::test_a_model_that_is_saved_before_it_is_trained_is_its_source_byte_for_byte",),
        "config.json would change where nothing had to",
    ),
    Fault(
        "dtype-of-a-nested-model-stays",
        _WRITER,
        '        written["text_config"] = changed(text)\n',
        "        pass\n",
        (f"{_KEPT}::test_of_config_json_only_the_dtype_of_the_language_model_changes",),
        "vLLM would serve a released model in another dtype than was saved",
    ),
    Fault(
        "usual-dtype-counts-what-is-kept",
        _WRITER,
        "_with_usual_dtype(described, infos)",
        "_with_usual_dtype(described, kept_infos or infos)",
        (f"{_KEPT}::test_a_model_that_is_saved_before_it_is_trained_is_its_source_byte_for_byte",),
        "a large vision tower would decide the dtype of the language model",
    ),
    Fault(
        "kept-weights-of-another-shape",
        "rl_backend/checkpoint/kept_weights.py",
        "if name not in reader.infos or reader.infos[name].shape != shape]",
        "if name not in reader.infos]",
        (f"{_KEPT}::test_a_source_that_lost_what_is_kept_is_refused_by_the_names",),
        "a model would be saved with parts of another one",
    ),
    Fault(
        "checkpoint-forgets-what-is-kept",
        "rl_backend/runtime/saved_state.py",
        "        kept=dict(handle.kept),\n",
        "",
        (f"{_EXPORT}::test_an_exported_model_is_the_one_that_its_run_saves",),
        "an exported model would lack its vision tower",
    ),
    Fault(
        "a-push-may-leave-out-anything",
        "rl_backend/weights/compare.py",
        "and name not in in_halves and name not in kept]",
        "and name not in in_halves and not kept]",
        (
            "tests/unit/actors/rollout/test_expected_weights.py::test_a_push_may_leave_out_what_its_trainer_keeps_and_nothing_else",
        ),
        "an engine of a released model would serve old weights beside new ones",
    ),
    Fault(
        "text-models-under-nested-names",
        "rl_backend/checkpoint/nested_names.py",
        "    if model_type in _MODEL_TYPES and",
        "    if False and",
        ("tests/unit/rl_backend/checkpoint/test_hf_reader.py::test_a_text_model_is_read_under_its_own_names",),
        "a model that was tuned with transformers could not be trained further",
    ),
    Fault(
        "decay-pushed-in-bfloat16",
        "rl_backend/contracts/weights.py",
        "    return torch.promote_types(dtype, torch.float32) if in_float32 else dtype\n",
        "    return dtype\n",
        (f"{_DTYPES}::test_weights_that_are_computed_with_in_float32_are_announced_and_sent_in_it",),
        "an engine would compute with another decay than the trainer",
    ),
    Fault(
        "images-rendered-as-text",
        "rl_backend/data/chat.py",
        '        if found is not None:\n            raise UnsupportedError(f"{place}',
        '        if False:\n            raise UnsupportedError(f"{place}',
        (f"{_MEDIA}::test_messages_with_media_are_refused_by_the_part",),
        "a model would train on tokens that stand for images which it never sees",
    ),
]
