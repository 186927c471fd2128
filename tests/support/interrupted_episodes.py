"""Episodes that hang while this process gets Ctrl-C: those of a batch, or of a held-out set.

python -m tests.support.interrupted_episodes batch|held_out LOG
"""

from __future__ import annotations

import sys
from itertools import repeat

from actors.collect.episodes import EpisodeStream, play_held_out
from actors.collect.held_out import HeldOutSet
from actors.rollout.config import SamplingConfig
from actors.run import run_command
from actors.run.run import StopRequest
from rl_backend.environment import PlayOptions, SteppedPlayer
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.hanging_game import HangingGame
from tests.support.token_sources import RandomSource

ROWS, EACH = 4, 4


def main() -> None:
    where, log = sys.argv[1:]
    tokenizer, rows = chat_tokenizer(CHATML), [{"log": log}] * ROWS
    player = SteppedPlayer(HangingGame, tokenizer)
    source = RandomSource(context_tokens=512, vocab_size=len(tokenizer))
    with StopRequest().on_signals("the run ends after this step"):
        if where == "held_out":
            held_out = HeldOutSet("rows", rows, SamplingConfig(n=EACH), (1,), 1.0)
            play_held_out(held_out, player, source, PlayOptions(), seed=1, index=0)
        else:
            batches = repeat(rows)
            with EpisodeStream(player, source, PlayOptions(), batches, n=EACH, seed=1, ahead=0) as stream:
                stream.next(more=0)


if __name__ == "__main__":
    run_command(main)
