"""A reward function as an environment: the answer is scored, after as many calls of tools as the model makes before it."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rl_backend.contracts import BatchError
from rl_backend.data.chat_template import decode
from rl_backend.data.examples import DataConfig, as_messages, shown_objects
from rl_backend.data.prompts import encode_prompt
from rl_backend.data.rewards import RewardCall, RewardScorer
from rl_backend.environment.protocol import MakeEnvironment, Prompt, Step, Tool, Turn


def answering(
    scorer: RewardScorer, tokenizer: Any, data: DataConfig | None = None, tools: Sequence[Tool] = ()
) -> MakeEnvironment:
    """Makes environments of rows whose answer a reward function scores.

    Without tools an episode has one turn, and its prompt has the ids that rollouts of one turn have. With ``tools``, which
    need prompts of messages, it continues until a turn calls none.
    """
    scoring = threading.Lock()

    def make(row: Mapping[str, Any], seed: int) -> AnswerEnvironment:
        del seed  # nothing is drawn
        return AnswerEnvironment(row, scorer, scoring, tokenizer, data or DataConfig(), tools)

    return make


class AnswerEnvironment:
    """See :func:`answering`; ``scoring`` is held while functions are called that must be called one after the other."""

    def __init__(
        self,
        row: Mapping[str, Any],
        scorer: RewardScorer,
        scoring: threading.Lock,
        tokenizer: Any,
        data: DataConfig,
        tools: Sequence[Tool],
    ) -> None:
        self.tools = tuple(tools)
        self._row = row
        self._scorer = scorer
        self._scoring = scoring
        self._tokenizer = tokenizer
        self._data = data

    def start(self) -> Prompt:
        prompt = self._row["prompt"]
        if not self.tools:
            tools, documents = self._shown("tools_column"), self._shown("documents_column")
            return encode_prompt(prompt, self._tokenizer, self._data, tools=tools, documents=documents)
        messages = as_messages(prompt, self._data, "prompt")
        if messages is None:
            raise BatchError("a prompt of text, which is continued as it stands; with tools set text_prompts to message")
        return messages

    def _shown(self, option: Literal["tools_column", "documents_column"]) -> tuple[dict[str, Any], ...]:
        name = getattr(self._data, option)
        return shown_objects(self._row.get(name), f"field {name}", option, self._row["prompt"], self._data)

    def step(self, turn: Turn) -> Step:
        if turn.calls:
            return Step()
        row = self._row
        text = decode(turn.token_ids, self._tokenizer, special=False)
        call = RewardCall(
            *(row.get("data_source", ""), text, row.get("ground_truth"), row.get("extra_info"), row["prompt"]),
            response_ids=turn.token_ids,
            columns=row,
        )
        # Functions that need no caller's thread run at once; only the others take turns.
        asked = self._scorer.begin([call])
        with self._scoring:
            (score,) = asked.result()
        if score.dropped:
            raise BatchError("; ".join(score.failures))
        return Step(reward=score.value, done=True, metrics=dict(score.numbers))

    def close(self) -> None:
        """Nothing is open: the scorer is the run's."""
