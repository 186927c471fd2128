"""Data: conversations as the model sees them, which tokens are trained, what is filtered and cut, the order of epochs."""

from __future__ import annotations

from tests.mutations.fault import Fault

_SFT = "rl_backend/data/sft.py"
_PROMPTS = "rl_backend/data/prompts.py"
_EXAMPLES = "tests/unit/rl_backend/data/test_sft_examples.py"
_READ = "tests/unit/rl_backend/data/test_prompts.py"
_TURN = f"{_EXAMPLES}::test_a_turn_is_trained_after_what_a_rollout_sees_and_with_its_end[chatml]"
_EPOCH = f"{_EXAMPLES}::test_an_epoch_has_every_example_once_in_even_batches"
_TOO_LONG = f"{_EXAMPLES}::test_examples_that_are_too_long_are_refused_filtered_or_cut_with_their_count"

FAULTS = [
    Fault(
        "end-of-a-turn-not-trained",
        _SFT,
        "template, written = chat_template(tokenizer), response[: end + 1]",
        "template, written = chat_template(tokenizer), response[:end]",
        (_TURN,),
        "a model would learn its answers and never to end them",
    ),
    Fault(
        "line-end-behind-a-turn-trained",
        _SFT,
        "    return places[-1] if places else None\n",
        "    return len(response) - 1 if places else None\n",
        (_TURN,),
        "a model would be trained on what the template adds and rollouts never have",
    ),
    Fault(
        "questions-are-trained-too",
        _SFT,
        "[*begun.trained, *[False] * between, *trained]",
        "[*begun.trained, *[bool(begun.trained)] * between, *trained]",
        (_TURN,),
        "later questions of a conversation would be imitated",
    ),
    Fault(
        "mask-on-the-token-itself",
        _SFT,
        "torch.tensor([*self.trained[1:], False], dtype=torch.float32)",
        "torch.tensor(self.trained, dtype=torch.float32)",
        (f"{_EXAMPLES}::test_one_renderer_gives_sft_the_prompts_of_rollouts",),
        "the first token of every answer would not be trained, and one behind it would",
    ),
    Fault(
        "all-turns-trained-where-the-last-is-asked-for",
        _SFT,
        """turns if train_on == "all" else turns[-1:]""",
        "turns",
        (f"{_EXAMPLES}::test_only_the_last_turn_is_trained_where_that_is_asked_for",),
        "train_on would be accepted and ignored",
    ),
    Fault(
        "marks-of-a-template-ignored",
        _SFT,
        "    if marks_answers(template):\n",
        "    if False:\n",
        (f"{_EXAMPLES}::test_what_a_template_leaves_unmarked_is_not_trained_but_the_end_is",),
        "text that the template writes would be trained as the model's",
    ),
    Fault(
        "rewritten-turns-share-a-sequence",
        _SFT,
        "found.pop() if found and prompt[: len(found[-1].token_ids)] == found[-1].token_ids else",
        "found.pop() if found else",
        (f"{_EXAMPLES}::test_turns_share_a_sequence_unless_the_template_rewrites_them",),
        "turns would be trained after a conversation that no rollout sees",
    ),
    Fault(
        "tokens-over-the-border-of-an-answer",
        _SFT,
        "response[len(prompt) :] if shared else tokenizer.encode(whole[len(before) :], add_special_tokens=False)\n",
        "response[len(prompt) :]\n",
        (f"{_EXAMPLES}::test_no_token_reaches_over_the_border_of_prompt_and_answer",),
        "an answer would lack its first token, or begin with one that no model could write there",
    ),
    Fault(
        "cut-answers-lose-their-beginning",
        _SFT,
        "token_ids = [*prompt, *self.token_ids[first:]][:max_tokens]\n",
        "token_ids = [*prompt, *self.token_ids[first:]][-max_tokens:]\n",
        (_TOO_LONG,),
        "masks would lie on other tokens, and answers begin in the middle",
    ),
    Fault(
        "cut-prompts-lose-their-end",
        _PROMPTS,
        "[*token_ids[:begins], *token_ids[len(token_ids) - most + begins :]]",
        "token_ids[:most]",
        (f"{_READ}::test_a_cut_keeps_the_end_of_a_prompt_and_the_token_that_begins_texts",),
        "the model would not see what it is asked",
    ),
    Fault(
        "filtered-prompts-kept",
        "rl_backend/data/examples.py",
        """            if over is None or too_long == "cut":\n""",
        """            if over is None or too_long != "refuse":\n""",
        (f"{_READ}::test_prompts_that_are_too_long_are_refused_filtered_or_cut_with_their_count",),
        "prompts that are said to be filtered would be sampled, cut",
    ),
    Fault(
        "system-prompt-before-ones-own",
        _PROMPTS,
        """if data.system_prompt is None or any(message["role"] == "system" for message in prompt):""",
        "if data.system_prompt is None:",
        (f"{_READ}::test_a_system_prompt_and_template_variables_reach_the_model",),
        "rows with a system prompt would have two",
    ),
    Fault(
        "prompts-without-the-assistants-beginning",
        "rl_backend/data/chat.py",
        "            add_generation_prompt=generation_prompt,\n",
        "            add_generation_prompt=False,\n",
        (f"{_READ}::test_a_system_prompt_and_template_variables_reach_the_model",),
        "engines would continue the user's turn",
    ),
    Fault(
        "template-variables-not-passed-on",
        "rl_backend/data/chat.py",
        "            add_generation_prompt=generation_prompt,\n            **variables,\n",
        "            add_generation_prompt=generation_prompt,\n",
        (f"{_READ}::test_a_system_prompt_and_template_variables_reach_the_model",),
        "enable_thinking would be accepted and ignored",
    ),
    Fault(
        "rows-counted-from-zero",
        "rl_backend/data/rows.py",
        "row {index + 1}",
        "row {index}",
        ("tests/unit/rl_backend/data/test_data_files.py::test_rows_of_parquet_are_counted_from_one_as_lines_are",),
        "a message would name the row before the wrong one",
    ),
    Fault(
        "a-file-changed-in-use-is-read-on",
        "rl_backend/data/rows.py",
        "        if xxhash.xxh3_64_intdigest(line) != self._digests[index]:\n",
        "        if not line:\n",
        (f"{_READ}::test_prompts_are_made_when_they_are_asked_for_and_a_change_of_the_file_is_seen",),
        "a resumed run would train on other prompts than it says",
    ),
    Fault(
        "last-examples-of-an-epoch-left-out",
        _PROMPTS,
        "    return -(-items // size)\n",
        "    return items // size\n",
        (_EPOCH,),
        "batches would be larger than asked for",
    ),
    Fault(
        "epochs-in-one-order",
        _PROMPTS,
        "    while True:\n        generator.shuffle(order)\n",
        "    generator.shuffle(order)\n    while True:\n",
        (_EPOCH,),
        "examples would always have the same neighbours",
    ),
    Fault(
        "row-without-its-answer-trained-on-something-else",
        _SFT,
        "require_answer=data.answer_column is not None",
        "require_answer=False",
        (f"{_EXAMPLES}::test_of_messages_and_an_answer_the_messages_are_trained_unless_the_column_is_named",),
        "an earlier turn would be trained where the column with the answer is empty",
    ),
]
