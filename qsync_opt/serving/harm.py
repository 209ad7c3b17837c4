"""Measured harms of a model: how much each weight scheme of each group changes what the model says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import Document, Extras, Json, Name, check_fields, freeze, load_file

HARM_FORMAT = "qsync-serving-harm/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm(Document):
    """Harm by group and scheme, measured on so many tokens of text.

    ``measure`` says of what: ``"divergence to second order"`` is about how far the next token's distribution moves if
    that group is rounded, in nats for each token.
    """

    FORMAT: ClassVar = HARM_FORMAT
    KIND: ClassVar = "harm"

    model: Name
    measure: Name
    tokens: Annotated[int, Json(minimum=1)]
    groups: Mapping[Name, Mapping[Name, float]]
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "harm")
        if not self.groups:
            raise ProblemError("harm: groups is empty, but a model has at least one")
        freeze(self, "extras")
        freeze(self, "groups", depth=2)


def load_harm(path: str | os.PathLike[str]) -> Harm:
    """Read and check a file of harms.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or a harm is no number of at least 0.

    Source: the harm file format of this package, "qsync-serving-harm/1".
    """
    return load_file(path, {HARM_FORMAT: Harm.from_json})
