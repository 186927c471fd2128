"""Weights that are stored in FP8."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "factors-of-the-first-blocks",
        "rl_backend.checkpoint.quantisation:BlockFactors.dequantised",
        "block_of_row = torch.arange(rows.start, rows.stop) // self.rows - rows.start // self.rows",
        "block_of_row = torch.arange(rows.stop - rows.start) // self.rows",
        ("test_published_blocks_with_edges_of_every_kind",),
        "a rank whose part begins inside of a block would take the factor of the block before",
    ),
    Fault(
        "column-blocks-from-the-parts-edge",
        "rl_backend.checkpoint.quantisation:BlockFactors.dequantised",
        "first = (columns.start // self.columns + number) * self.columns - columns.start",
        "first = number * self.columns",
        ("test_published_blocks_with_edges_of_every_kind",),
        "columns behind the edge of a block would have the factor of the block before",
    ),
    Fault(
        "quantization-config-of-plain-weights",
        "rl_backend.checkpoint.hf_writer:write_hf_directory",
        "(mxfp4_config if mxfp4 else without_quantisation)(source_config if config is None else config)",
        "dict(source_config if config is None else config)",
        ("test_a_model_in_fp8_is_built_saved_and_read_again",),
        "engines would look for FP8 in a saved model, which has none",
    ),
    Fault(
        "any-fp8-read",
        "rl_backend.contracts.hf_config:quantisation_problem",
        "if given.get(field) not in honoured:",
        "if False:",
        ("test_other_quantisation_is_refused_by_name",),
        "weights of another format would be multiplied by what are no factors of theirs",
    ),
    Fault(
        "columns-in-blocks-of-rows",
        "rl_backend.checkpoint.quantisation:BlockFactors.region",
        "columns.start // self.columns",
        "columns.start // self.rows",
        (
            "test_a_part_of_a_weight_whose_blocks_are_not_square_has_its_own_factors",
            "test_a_part_reads_only_the_factors_of_its_blocks",
        ),
        "a rank's part of a weight would have factors of other blocks",
    ),
]
