"""Episodes of many turns: environments and tools, and the record of every token exactly as it was sampled."""

from rl_backend.environment.groups import Group as Group
from rl_backend.environment.groups import GroupTask as GroupTask
from rl_backend.environment.groups import PlayOptions as PlayOptions
from rl_backend.environment.groups import play_groups as play_groups
from rl_backend.environment.playing import play_episode as play_episode
from rl_backend.environment.protocol import Environment as Environment
from rl_backend.environment.protocol import Episode as Episode
from rl_backend.environment.protocol import Generation as Generation
from rl_backend.environment.protocol import Limits as Limits
from rl_backend.environment.protocol import MakeEnvironment as MakeEnvironment
from rl_backend.environment.protocol import Player as Player
from rl_backend.environment.protocol import Result as Result
from rl_backend.environment.protocol import Sampler as Sampler
from rl_backend.environment.protocol import Segment as Segment
from rl_backend.environment.protocol import Step as Step
from rl_backend.environment.protocol import TokenSource as TokenSource
from rl_backend.environment.protocol import Tool as Tool
from rl_backend.environment.protocol import ToolCall as ToolCall
from rl_backend.environment.protocol import Turn as Turn
from rl_backend.environment.protocol import load_environment as load_environment
from rl_backend.environment.protocol import load_player as load_player
from rl_backend.environment.reward_environment import answering as answering
from rl_backend.environment.stepping import StepOptions as StepOptions
from rl_backend.environment.stepping import SteppedPlayer as SteppedPlayer
from rl_backend.environment.tools import ToolPool as ToolPool
