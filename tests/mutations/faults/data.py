"""Data: conversations as the model sees them, which tokens are trained, what is filtered and cut, the order of epochs."""

from __future__ import annotations

from tests.mutations.fault import Fault

_TURN = "test_a_turn_is_trained_after_what_a_rollout_sees_and_with_its_end[chatml]"
_EPOCH = "test_an_epoch_has_every_example_once_in_even_batches"
_TOO_LONG = "test_examples_that_are_too_long_are_refused_filtered_or_cut_with_their_count"

FAULTS = [
    Fault(
        "end-of-a-turn-not-trained",
        "rl_backend.data.sft:_turn",
        "written = response[: end + 1]",
        "written = response[:end]",
        (_TURN,),
        "a model would learn its answers and never to end them",
    ),
    Fault(
        "line-end-behind-a-turn-trained",
        "rl_backend.data.sft:_end",
        "return places[-1] if places else None",
        "return len(response) - 1 if places else None",
        (_TURN,),
        "a model would be trained on what the template adds and rollouts never have",
    ),
    Fault(
        "questions-are-trained-too",
        "rl_backend.data.sft:conversation_tokens",
        "*[False] * between,",
        "*[bool(begun.trained)] * between,",
        (_TURN,),
        "later questions of a conversation would be imitated",
    ),
    Fault(
        "mask-on-the-token-itself",
        "rl_backend.data.sft:TrainedTokens.sequence",
        "mask = torch.tensor([*self.trained[1:], False], dtype=torch.float32)",
        "mask = torch.tensor(self.trained, dtype=torch.float32)",
        ("test_one_renderer_gives_sft_the_prompts_of_rollouts",),
        "the first token of every answer would not be trained, and one behind it would",
    ),
    Fault(
        "all-turns-trained-where-the-last-is-asked-for",
        "rl_backend.data.sft:conversation_tokens",
        'for turn in turns if train_on == "all" else turns[-1:]:',
        "for turn in turns:",
        ("test_only_the_last_turn_is_trained_where_that_is_asked_for",),
        "train_on would be accepted and ignored",
    ),
    Fault(
        "marks-of-a-template-ignored",
        "rl_backend.data.sft:_turn",
        "if marks_answers(chat_template(tokenizer)):",
        "if False:",
        ("test_what_a_template_leaves_unmarked_is_not_trained_but_the_end_is",),
        "text that the template writes would be trained as the model's",
    ),
    Fault(
        "rewritten-turns-share-a-sequence",
        "rl_backend.data.sft:conversation_tokens",
        "found and prompt[: len(found[-1].token_ids)] == found[-1].token_ids",
        "found",
        ("test_turns_share_a_sequence_unless_the_template_rewrites_them",),
        "turns would be trained after a conversation that no rollout sees",
    ),
    Fault(
        "tokens-over-the-border-of-an-answer",
        "rl_backend.data.sft:_turn",
        "response[len(prompt) :] if shared else tokenizer.encode(whole[len(before) :], add_special_tokens=False)",
        "response[len(prompt) :]",
        ("test_no_token_reaches_over_the_border_of_prompt_and_answer",),
        "an answer would lack its first token, or begin with one that no model could write there",
    ),
    Fault(
        "cut-answers-lose-their-beginning",
        "rl_backend.data.sft:TrainedTokens.cut",
        "token_ids = [*prompt, *self.token_ids[first:]][:max_tokens]",
        "token_ids = [*prompt, *self.token_ids[first:]][-max_tokens:]",
        (_TOO_LONG,),
        "masks would lie on other tokens, and answers begin in the middle",
    ),
    Fault(
        "cut-prompts-lose-their-end",
        "rl_backend.data.examples:cut_prompt",
        "return [*token_ids[:begins], *token_ids[len(token_ids) - most + begins :]]",
        "return token_ids[:most]",
        ("test_a_cut_keeps_the_end_of_a_prompt_and_the_token_that_begins_texts",),
        "the model would not see what it is asked",
    ),
    Fault(
        "filtered-prompts-kept",
        "rl_backend.data.examples:Examples.__init__",
        'if over is None or too_long == "cut":',
        'if over is None or too_long != "refuse":',
        ("test_prompts_that_are_too_long_are_refused_filtered_or_cut_with_their_count",),
        "prompts that are said to be filtered would be sampled, cut",
    ),
    Fault(
        "system-prompt-before-ones-own",
        "rl_backend.data.examples:as_messages",
        'if data.system_prompt is None or any(message["role"] == "system" for message in prompt):',
        "if data.system_prompt is None:",
        ("test_a_system_prompt_and_template_variables_reach_the_model",),
        "rows with a system prompt would have two",
    ),
    Fault(
        "prompts-without-the-assistants-beginning",
        "rl_backend.data.chat_template:ChatTemplate.render.rendered",
        "add_generation_prompt=generation_prompt,",
        "add_generation_prompt=False,",
        ("test_a_system_prompt_and_template_variables_reach_the_model",),
        "engines would continue the user's turn",
    ),
    Fault(
        "template-variables-not-passed-on",
        "rl_backend.data.chat_template:ChatTemplate.inputs",
        "**variables,",
        "",
        ("test_a_system_prompt_and_template_variables_reach_the_model",),
        "enable_thinking would be accepted and ignored",
    ),
    Fault(
        "tools-of-rows-not-shown-in-prompts",
        "rl_backend.data.prompts:load_prompts",
        'shown = {"tools": example.tools, "documents": example.documents}',
        'shown = {"tools": (), "documents": example.documents}',
        ("test_tools_and_documents_of_a_row_are_what_the_template_makes_of_them",),
        "a model would be asked to call tools of which it is not told",
    ),
    Fault(
        "tools-of-rows-not-shown-in-sft",
        "rl_backend.data.sft:example_tokens",
        "tools=example.tools,",
        "",
        ("test_tools_and_documents_of_a_row_are_what_the_template_makes_of_them",),
        "calls would be trained behind prompts without the tools that rollouts have",
    ),
    Fault(
        "null-content-as-empty-text",
        "rl_backend.data.examples:_Reader.message",
        '{"content": content}',
        '{"content": content or ""}',
        ("test_content_that_is_null_beside_calls_is_what_the_template_makes_of_null",),
        "templates that ask whether content is null would leave out the calls",
    ),
    Fault(
        "today-in-templates",
        "rl_backend.data.chat_template:_clock",
        "now = None if given is None else datetime.fromisoformat(str(given))",
        "now = datetime.now() if given is None else datetime.fromisoformat(str(given))",
        ("test_a_template_that_reads_the_clock_is_given_one_day",),
        "a run that is resumed on another day would train on other tokens",
    ),
    Fault(
        "rows-counted-from-zero",
        "rl_backend.data.rows:Rows.where",
        'return f"{self.source}, row {index + 1}"',
        'return f"{self.source}, row {index}"',
        ("test_rows_of_parquet_are_counted_from_one_as_lines_are",),
        "a message would name the row before the wrong one",
    ),
    Fault(
        "a-file-changed-in-use-is-read-on",
        "rl_backend.data.rows:TextRows.read",
        "if xxhash.xxh3_64_intdigest(found) != self._digests[index]:",
        "if not found:",
        ("test_prompts_are_made_when_they_are_asked_for_and_a_change_of_the_file_is_seen",),
        "a resumed run would train on other prompts than it says",
    ),
    Fault(
        "last-examples-of-an-epoch-left-out",
        "rl_backend.data.prompts:batches_per_epoch",
        "return -(-items // size)",
        "return items // size",
        (_EPOCH,),
        "batches would be larger than asked for",
    ),
    Fault(
        "epochs-in-one-order",
        "rl_backend.data.prompts:_passes",
        """
        while True:
            generator.shuffle(order)
            start = 0
            for size in sizes:
                if left_out:
                    left_out -= 1
                else:
                    yield [items[index] for index in order[start : start + size]]
                start += size
        """,
        """
        generator.shuffle(order)
        while True:
            start = 0
            for size in sizes:
                if left_out:
                    left_out -= 1
                else:
                    yield [items[index] for index in order[start : start + size]]
                start += size
        """,
        (_EPOCH,),
        "examples would always have the same neighbours",
    ),
    Fault(
        "row-without-its-answer-trained-on-something-else",
        "rl_backend.data.sft:load_sft_examples.make",
        "example = read_example(rows, index, data, tools, require_answer=data.answer_column is not None)",
        "example = read_example(rows, index, data, tools, require_answer=False)",
        ("test_of_messages_and_an_answer_the_messages_are_trained_unless_the_column_is_named",),
        "an earlier turn would be trained where the column with the answer is empty",
    ),
    Fault(
        "fields-of-other-rows-called-as-null",
        "rl_backend.data.examples:_Reader.prompt",
        "value = self.without_padding(name, value)",
        "pass",
        ("test_rows_have_the_same_tokens_out_of_every_source",),
        "calls out of a table would have the arguments of every function",
    ),
    Fault(
        "cells-and-texts-with-types-of-the-library",
        "rl_backend.data.datasets:_text_files",
        "all_files = [each for paths in files.values() for each in paths]",
        "all_files = []",
        ("test_rows_have_the_same_tokens_out_of_every_source",),
        "answers of digits in a folder's .csv file would be numbers",
    ),
    Fault(
        "answers-encoded-alone",
        "rl_backend.data.chat_template:encode_answer",
        "return before, [*whole[len(before) :], tokenizer.eos_token_id]",
        "return before, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]",
        ("test_an_answer_has_the_tokens_that_prompt_and_answer_have_together",),
        "models would learn a space before every answer",
    ),
    Fault(
        "begin-of-text-twice",
        "rl_backend.data.chat_template:encode_text",
        "return [*begins, *own[has:]]",
        "return [*begins, *own]",
        ("test_texts_with_special_tokens_of_their_own_have_them_once",),
        "prompts that were rendered before would begin twice",
    ),
    Fault(
        "ends-of-answers-twice",
        "rl_backend.data.chat_template:encode_answer",
        "if answer.rstrip().endswith(tokenizer.eos_token):",
        "if False:",
        ("test_texts_with_special_tokens_of_their_own_have_them_once",),
        "models would learn to write their end twice",
    ),
    Fault(
        "best-fit-refuses-what-fits-exactly",
        "rl_backend.data.balance:_best_fit",
        "room[bin_] >= seq_lens[index]",
        "room[bin_] > seq_lens[index]",
        ("test_a_full_budget_that_only_best_fit_reaches_is_used",),
        "micro-batches that are just full would be split, and a step would take longer",
    ),
    Fault(
        "longer-fields-pass",
        "rl_backend.contracts.batch:_require_rows",
        "value.shape[0] != rows",
        "value.shape[0] < rows",
        ("test_shapes_that_do_not_fit_are_refused_by_name",),
        "fields of other sequences would be trained on as these one's",
    ),
    Fault(
        "half-surrogates-inside-tuples-pass",
        "rl_backend.data.chat_template:require_utf8",
        "isinstance(value, list | tuple)",
        "isinstance(value, list)",
        ("test_half_of_a_surrogate_pair_is_found_in_lists_tuples_and_objects",),
        "a row would fail in the tokenizer, which does not name it",
    ),
    Fault(
        "system-message-is-looked-for-in-front",
        "rl_backend.data.examples:as_messages",
        'any(message["role"] == "system" for message in prompt)',
        'any(message["role"] == "system" for message in prompt[:1])',
        ("test_a_system_message_anywhere_in_a_row_takes_the_place_of_the_runs_own",),
        "a row with a system message of its own would get a second one",
    ),
    Fault(
        "answers-judged-with-the-options-of-other-questions",
        "rl_backend.data.gym:_score",
        '_opened(entry.pop("gym", PREFIX + task))',
        "_opened(PREFIX + task)",
        ("test_answers_are_judged_with_the_options_that_made_the_question",),
        "right answers to questions of other sizes than a task's usual ones would count as wrong",
    ),
]
