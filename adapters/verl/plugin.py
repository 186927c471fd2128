"""What verl imports wherever it is imported itself: the entry point of the group ``verl.plugins``.

``VERL_USE_EXTERNAL_MODULES=adapters.verl.plugin`` does the same without it, and does not swallow errors.
"""

from adapters.verl import cpu_platform, run_config
from adapters.verl.registration import register_vendors

cpu_platform.register()
register_vendors()
run_config.register()
