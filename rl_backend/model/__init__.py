"""Models by kind of block. Importing this package registers the built-in families."""

from rl_backend.model.families import deepseek as deepseek
from rl_backend.model.families import dense as dense
from rl_backend.model.families import mixtures as mixtures
from rl_backend.model.families import qwen3_5 as qwen3_5
from rl_backend.model.families.dense import QWEN3 as QWEN3
from rl_backend.model.families.mixtures import MIXTRAL as MIXTRAL
from rl_backend.model.families.mixtures import QWEN3_MOE as QWEN3_MOE
from rl_backend.model.input import BuildSettings as BuildSettings
from rl_backend.model.input import ModelInput as ModelInput
from rl_backend.model.input import ModelStage as ModelStage
from rl_backend.model.registry import MODEL_FAMILIES as MODEL_FAMILIES
from rl_backend.model.registry import ModelFamily as ModelFamily
from rl_backend.model.registry import find_model as find_model
from rl_backend.model.registry import model_kept_prefixes as model_kept_prefixes
from rl_backend.model.registry import model_positions as model_positions
from rl_backend.model.registry import register_model as register_model
