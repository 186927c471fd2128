"""tinker-cookbook's environments as players of episodes. Nothing of tinker-cookbook is imported: yours brings it."""

from adapters.cookbook.player import CookbookEnv as CookbookEnv
from adapters.cookbook.player import CookbookPlayer as CookbookPlayer
from adapters.cookbook.player import MakeCookbookEnv as MakeCookbookEnv
