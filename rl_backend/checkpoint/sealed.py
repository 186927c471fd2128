"""JSON files that know whether they are as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import xxhash
from pydantic import ValidationError

from rl_backend.contracts import CheckpointError, ConfigError
from rl_backend.contracts.base_config import BaseConfig

_DIGEST = '"digest": "{}"'


class SealedConfig(BaseConfig):
    """A configuration that is written with a digest of its own text.

    Attributes:
        digest: xxh3-64 of the text with this field, the first in it, empty.
    """

    digest: str = ""

    def sealed_text(self) -> str:
        """The text to write."""
        text = self.replace(digest="").model_dump_json(indent=1)
        return text.replace(_DIGEST.format(""), _DIGEST.format(_digest(text)), 1)

    @classmethod
    def read_sealed(cls, file: Path) -> Self:
        """Reads a file of :meth:`sealed_text`.

        Raises:
            CheckpointError: it is something else, or has been changed.
        """
        details = {"path": str(file.parent), "name": file.name}
        try:
            text = file.read_text()
            found = cls.model_validate_json(text)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}", **details) from None
        except ValidationError as error:
            reasons = "; ".join(problem["msg"] for problem in error.errors())
            raise CheckpointError(f"{file} is damaged: {reasons}; take an earlier checkpoint", **details) from None
        except (ConfigError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} is damaged: {error}; take an earlier checkpoint", **details) from None
        if _digest(text.replace(_DIGEST.format(found.digest), _DIGEST.format(""), 1)) != found.digest:
            raise CheckpointError(
                f"{file} is damaged: it has other text than was written; take an earlier checkpoint", **details
            )
        return found


def _digest(text: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(text.encode()))
