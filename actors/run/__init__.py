"""A run of your loop: folder, checkpoints, logs, samples with their rewards, and how it ends.

``Run`` and ``RLRun`` are the way in (``from actors import Run``). What loops need beside them is named here, and imported
when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_backend.lazy import lazy_names

if TYPE_CHECKING:
    from actors.collect.episodes import EpisodeBatch as EpisodeBatch
    from actors.collect.held_out import HeldOutResult as HeldOutResult
    from actors.collect.prompts import TrainingBatch as TrainingBatch
    from actors.folder.resume import RunFinishedError as RunFinishedError
    from actors.options.config import RunModel as RunModel
    from actors.options.config import TrainingConfig as TrainingConfig
    from actors.options.eval_sets import EvalSet as EvalSet
    from actors.options.policy_options import PolicyLoss as PolicyLoss
    from actors.options.sampled_config import EpisodeConfig as EpisodeConfig
    from actors.options.sampled_config import RLConfig as RLConfig
    from actors.rollout.config import positions_of as positions_of
    from actors.run.command_line import run_command as run_command
    from actors.run.evaluation import EvalConfig as EvalConfig
    from actors.run.evaluation import evaluate as evaluate
    from actors.run.run import OnStep as OnStep
    from actors.run.sampling import RunResult as RunResult
    from actors.run.session import require_one_session as require_one_session
    from actors.run.stop import StopRequest as StopRequest
    from actors.train.model import GroupModel as GroupModel
    from actors.train.model import update_metrics as update_metrics
    from actors.watch.console import Phases as Phases
    from actors.watch.console import announce as announce
    from actors.watch.console import warn as warn
    from actors.watch.metrics import MetricsWriter as MetricsWriter
    from rl_backend.algorithm.sequences import Advantage as Advantage
    from rl_backend.algorithm.sequences import kl_metrics as kl_metrics
    from rl_backend.algorithm.sequences import rewards_of_tokens as rewards_of_tokens
    from rl_backend.algorithm.sequences import to_sequences as to_sequences
    from rl_backend.algorithm.sequences import update_parts as update_parts
    from rl_backend.algorithm.sequences import with_advantages as with_advantages
    from rl_backend.algorithm.sequences import with_episode_gae as with_episode_gae
    from rl_backend.algorithm.sequences import with_outputs as with_outputs
    from rl_backend.lab.report.page import write_report as write_report
    from rl_backend.options.command_line import parse_config as parse_config
    from rl_backend.options.option_set import Follows as Follows
    from rl_backend.options.option_set import OptionSet as OptionSet
    from rl_backend.options.option_set import overlaid as overlaid

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
