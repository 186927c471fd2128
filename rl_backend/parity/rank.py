"""``python -m rl_backend.parity.rank CONFIG SIDE OUTPUT``: one rank, in a process that the comparison started.

``OUTPUT`` becomes the rank's record, or ``OUTPUT.error`` says in JSON why there is none.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

from rl_backend.contracts import ConfigError, RLBackendError, UnsupportedError
from rl_backend.parity.config import TRANSFORMERS, ParityConfig
from rl_backend.parity.record import RankRecord


def main(config_file: str, side_name: str, output: str) -> int:
    """Exit status 0 when the record is there."""
    try:
        config = ParityConfig.model_validate_json(Path(config_file).read_text())
        torch.set_num_threads(config.threads)
        side = config.side("reference" if side_name == "reference" else "candidate")
        rank = int(os.environ.get("RANK", "0"))
        record: RankRecord
        if side.runtime == TRANSFORMERS:
            from rl_backend.parity.transformers_side import record_transformers

            record = record_transformers(config, side)
        else:
            from rl_backend.parity.runtime_side import record_runtime

            record = record_runtime(config, side, rank)
        record.save(Path(output))
    except Exception as error:  # noqa: BLE001 - the process that started this one shows it
        known = isinstance(error, RLBackendError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        details = {
            "message": message,
            "expected": known,
            "refused": isinstance(error, ConfigError | UnsupportedError),
            "traceback": traceback.format_exc(),
        }
        Path(f"{output}.error").write_text(json.dumps(details))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
