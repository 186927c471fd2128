"""Layers of uneven pipeline stages, counted by hand. test_megatron.py compares them with Megatron's own count."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.verl.options.megatron import stage_layers
from rl_backend.contracts import ConfigError

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("fields", "layers", "pp", "vpp", "expected"),
    [
        ({FIRST: 2}, 8, 3, 1, (2, 3, 3)),
        ({LAST: 2}, 8, 4, 1, (2, 2, 2, 2)),
        ({FIRST: 1, LAST: 4}, 13, 4, 1, (1, 4, 4, 4)),
        ({FIRST: 5, LAST: 3}, 8, 2, 1, (5, 3)),
        ({FIRST: 2, LAST: 6}, 12, 3, 2, (1, 2, 3, 1, 2, 3)),
        ({LAST: 3}, 15, 3, 3, (2, 2, 1, 2, 2, 1, 2, 2, 1)),
        ({FIRST: 6}, 8, 3, 1, (6, 1, 1)),
        ({EMBEDDING: True}, 7, 4, 1, (1, 2, 2, 2)),
        ({LOSS: True}, 7, 4, 1, (2, 2, 2, 1)),
        ({EMBEDDING: True, LOSS: True}, 10, 3, 2, (1, 2, 2, 2, 2, 1)),
        ({EMBEDDING: True}, 11, 2, 3, (1, 2, 2, 2, 2, 2)),
        ({LAYOUT: "Et|ttL"}, 3, 2, 1, (1, 2)),
        ({LAYOUT: "E|t*4|ttL"}, 6, 3, 1, (0, 4, 2)),
        ({LAYOUT: "'Ettt|(t|)*2,L'"}, 5, 2, 2, (3, 1, 1, 0)),
        ({LAYOUT: '"E,t*12|L"'}, 12, 2, 1, (12, 0)),
    ],
)
def test_each_stage_has_its_layers_in_the_order_of_the_model(
    fields: dict[str, Any], layers: int, pp: int, vpp: int, expected: tuple[int, ...]
) -> None:
    found = stage_layers("x", fields, layers, pp, vpp)
    assert found == expected
    assert sum(found) == layers and len(found) == pp * vpp


@pytest.mark.parametrize(
    ("fields", "layers", "pp", "vpp", "problem"),
    [
        ({FIRST: 0}, 8, 2, 1, rf"^x\['{FIRST}'\]=0: expected a number of layers, 1 or more, or null"),
        ({FIRST: 1, LAST: True}, 8, 2, 1, rf"^x\['{LAST}'\]=True: expected a number of layers"),
        ({EMBEDDING: 1}, 7, 2, 1, rf"^x\['{EMBEDDING}'\]=1: expected True or False"),
        ({LOSS: None}, 7, 2, 1, rf"^x\['{LOSS}'\]=None: expected True or False"),
        ({LAST: 3}, 8, 1, 1, "needs stages; set pipeline_model_parallel_size above 1"),
        ({LAST: 3, LAYOUT: "EttttttttL", FIRST: 2}, 8, 2, 1, "exclude each other; keep the layout, first and last"),
        ({FIRST: 1, EMBEDDING: True}, 8, 2, 1, "exclude each other"),
        ({LAST: 1, LOSS: True}, 8, 2, 1, "exclude each other"),
        ({FIRST: 7, LAST: 1}, 8, 3, 1, "cannot divide 8 layers"),
        ({FIRST: 3, LAST: 4}, 8, 2, 1, "cannot divide 8 layers"),
        ({FIRST: 9}, 8, 2, 1, "cannot divide 8 layers"),
        ({LAST: 3}, 8, 3, 1, "first and the last of 3 pipeline ranks"),
        ({EMBEDDING: True}, 8, 2, 1, "an embedding or a loss counts as a layer"),
        ({FIRST: 3, LAST: 5}, 8, 2, 2, "among its 2 virtual stages"),
        ({FIRST: 4, LAST: 5}, 9, 2, 2, "among its 2 virtual stages"),
        ({LAYOUT: "Et|tL"}, 3, 2, 1, "t for each of 3 layers between, in 2 stages"),
        ({LAYOUT: "Et|t|tL"}, 3, 2, 1, "t for each of 3 layers between, in 2 stages"),
        ({LAYOUT: "t|tL"}, 2, 2, 1, "expected E in front, L at the end"),
        ({LAYOUT: "Et|t"}, 2, 2, 1, "expected E in front, L at the end"),
        ({LAYOUT: ["Et", "tL"]}, 2, 2, 1, "expected E in front, L at the end"),
    ],
)
def test_fields_that_do_not_fit_are_refused_in_words(
    fields: dict[str, Any], layers: int, pp: int, vpp: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        stage_layers("x", fields, layers, pp, vpp)
