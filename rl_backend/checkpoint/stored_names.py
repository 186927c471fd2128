"""Names of tensors in directories that models call by others: nested text models, and experts packed into one tensor.

transformers' ``AutoModelForCausalLM`` takes the language model out of a released Qwen3.5, and saves it so: ``config.json``
is that of the text model alone, the names are nested. transformers and vLLM load it as they load the text model's own names.

Qwen publishes mixtures of Qwen3.5 with the experts of a layer in one tensor in bfloat16, but in FP8 expert by expert, as
transformers saves them. Models know the names of single experts: whichever a directory has, they find.
"""

from collections.abc import Iterator
from typing import NamedTuple

_NESTED_TYPES = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_NESTED, _OWN = "model.language_model.", "model."


def own_name(model_type: object, name: str) -> str:
    """The name that a stored tensor has in the text model; ``name`` itself where it is that, or of another model.

    Args:
        model_type: of ``config.json``.
    """
    if model_type in _NESTED_TYPES and name.startswith(_NESTED):
        return _OWN + name.removeprefix(_NESTED)
    return name


_PACKED_TYPES = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class ExpertPart(NamedTuple):
    """One tensor of one expert, inside of a packed tensor.

    Attributes:
        name: as it is called where experts are not packed.
        packed: the name of the packed tensor.
        expert: number of the expert, the first dimension.
        rows: its place in the second.
        columns: of the third.
    """

    name: str
    packed: str
    expert: int
    rows: range
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.columns

    def place(self, region: tuple[slice, ...]) -> tuple[slice, ...]:
        """``region`` of this tensor, in the packed one; a dimension of one expert comes first."""
        first, *others = region or (slice(None),)
        rows = self.rows[first]
        return slice(self.expert, self.expert + 1), slice(rows.start, rows.stop), *others


def expert_parts(model_type: object, name: str, shape: tuple[int, ...]) -> Iterator[ExpertPart]:
    """The tensors of single experts in the stored tensor called ``name``; none of one that packs no experts.

    What begins with another name than the model's, as a layer for multi-token prediction, is left as it is.

    Args:
        model_type: of ``config.json``.
        shape: (experts, rows of all projections, columns).
    """
    block, _, last = name.rpartition(".")
    if model_type not in _PACKED_TYPES or last not in _PROJECTIONS or len(shape) != 3:
        return
    if not (name.startswith("model.") and block.endswith(".mlp.experts")):
        return
    projections = _PROJECTIONS[last]
    size = shape[1] // len(projections)
    for expert in range(shape[0]):
        for number, projection in enumerate(projections):
            rows = range(number * size, (number + 1) * size)
            yield ExpertPart(f"{block}.{expert}.{projection}.weight", name, expert, rows, shape[2])
