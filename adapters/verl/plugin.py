"""The plugin that verl imports in every process that imports verl (entry points ``verl.plugins``).

``VERL_USE_EXTERNAL_MODULES=adapters.verl.plugin`` does the same without the entry point, and does not swallow errors.
"""

from adapters.verl import cpu_platform, run_config
from adapters.verl.registration import register_vendors
from adapters.verl.trainers import register_prefix_groups, register_saves

cpu_platform.register()
register_vendors()
run_config.register()
register_saves()
register_prefix_groups()
