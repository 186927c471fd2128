"""The plugin that verl imports in every process that imports verl (entry points ``verl.plugins``).

``VERL_USE_EXTERNAL_MODULES=adapters.verl.plugin`` does the same without the entry point, and does not swallow errors.
"""

from typing import Any

from adapters.verl import cpu_platform, run_config
from adapters.verl.registration import register_vendors
from adapters.verl.trainers import register_prefix_groups, register_saves


def _choose_engine(model_type: str, engine_config: Any, backend: str | None) -> tuple[type, Any]:
    # Imported only where an engine is built, because it imports verl's configurations and engines.
    from adapters.verl.engine_config import choose_engine

    return choose_engine(model_type, engine_config, backend)


cpu_platform.register()
register_vendors(_choose_engine)
run_config.register()
register_saves()
register_prefix_groups()
