"""Weights that are stored in FP8."""

from __future__ import annotations

from tests.mutations.fault import Fault

_FILE = "rl_backend/checkpoint/block_fp8.py"
_TESTS = "tests/unit/rl_backend/checkpoint/test_block_fp8.py"

FAULTS = [
    Fault(
        "factors-of-the-first-blocks",
        _FILE,
        "        block_of_row = torch.arange(rows.start, rows.stop) // self.rows - rows.start // self.rows\n",
        "        block_of_row = torch.arange(rows.stop - rows.start) // self.rows\n",
        (f"{_TESTS}::test_published_blocks_with_edges_of_every_kind",),
        "a rank whose part begins inside of a block would take the factor of the block before",
    ),
    Fault(
        "column-blocks-from-the-parts-edge",
        _FILE,
        "            first = (columns.start // self.columns + number) * self.columns - columns.start\n",
        "            first = number * self.columns\n",
        (f"{_TESTS}::test_published_blocks_with_edges_of_every_kind",),
        "columns behind the edge of a block would have the factor of the block before",
    ),
    Fault(
        "quantization-config-of-plain-weights",
        "rl_backend/checkpoint/hf_writer.py",
        "(mxfp4_config if mxfp4 else without_quantisation)(source_config if config is None else config)",
        "dict(source_config if config is None else config)",
        (f"{_TESTS}::test_a_model_in_fp8_is_built_saved_and_read_again",),
        "engines would look for FP8 in a saved model, which has none",
    ),
    Fault(
        "any-fp8-read",
        "rl_backend/contracts/hf_config.py",
        "        if given.get(field) not in honoured:\n",
        "        if False:\n",
        (f"{_TESTS}::test_other_quantisation_is_refused_by_name",),
        "weights of another format would be multiplied by what are no factors of theirs",
    ),
]
