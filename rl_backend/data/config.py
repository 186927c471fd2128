"""Options of data: columns, rendering as tokens, and the treatment of examples that are too long."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_backend.contracts import SAME_CONTENTS, BaseConfig

type TooLong = Literal["refuse", "filter", "cut"]


class DataConfig(BaseConfig):
    """How the rows of ``dataset`` and of held-out rows are read.

    Attributes:
        prompt_column: text or chat messages; a.b is field b of column a; none: prompt, else messages.
        answer_column: what the reward compares with, and what SFT imitates; none: reward_model.ground_truth, ground_truth
            or answer, else the assistant's message at the end of messages.
        tools_column: JSON schemas of the functions that the model may call, for the chat template; none: rows have no such
            column.
        tools_file: a JSON list of schemas for rows that have none of their own.
        documents_column: documents for the chat template; none: rows have no such column.
        text_prompts: prompts that are text are continued as they stand, or are a user's message for the chat template.
        system_prompt: begins conversations that have no system message.
        chat_template_kwargs: variables of the chat template, such as {"enable_thinking": false}; strftime_now is the day
            that a template writes as today's.
        too_long: what is done with prompts of more than max_prompt_tokens: refuse the run, filter them out, or cut off their
            beginnings. SFT cuts off the ends of answers that do not fit into max_tokens_per_micro_batch.
    """

    prompt_column: str | None = None
    answer_column: str | None = None
    tools_column: str | None = "tools"
    tools_file: Annotated[str | None, SAME_CONTENTS] = None
    documents_column: str | None = "documents"
    text_prompts: Literal["continue", "message"] = "continue"
    system_prompt: str | None = Field(default=None, min_length=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    too_long: TooLong = "refuse"
