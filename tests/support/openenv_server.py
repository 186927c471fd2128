"""A guessing game as a server of OpenEnv, for the Python that has it: python openenv_server.py PORT"""

from __future__ import annotations

import sys
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Answer(Observation):
    text: str


class GuessingGame(Environment):
    """A number from 0 to 7; 1 for finding it, and three turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 5, **rest: Any) -> Answer:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._number = number
        return Answer(text="guess")

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Answer:
        self._state.step_count += 1
        found = action.guess == self._number
        text = "yes" if found else "higher" if action.guess < self._number else "lower"
        return Answer(text=text, reward=float(found), done=found or self._state.step_count == 3)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(GuessingGame, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
