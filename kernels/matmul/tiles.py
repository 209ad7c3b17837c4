"""Choice of the tile that each product is cut into: tables of the package, and those tuned on this machine.

A choice changes nothing but the order of FP32 sums. It is looked up by the codes, shape and number of
multiprocessors; a product in no table gets the estimate of the compiled code, the same on every run. ``tune``
measures, keeps the fastest choice in a file of the user's cache folder, and uses it from then on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import Fields, Json, check_fields, decode, read_json, write_json
from qsync_opt.kernels.compilation import builder, library

CHOICES_FORMAT = "qsync-matmul-choices/1"
TABLES = Path(__file__).resolve().parents[1] / "tables"
# In the order of the compiled code's numbers.
CODES: dict[torch.dtype, str] = {torch.int8: "INT8", torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
_CODE_NAMES = tuple(CODES.values())
_Count = Annotated[int, Json(minimum=1)]
_CHOICE_NUMBERS = ("variant", "splits", "group")

_FRAGMENT: Any = torch.library.Library(library.NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_FRAGMENT.define("scaled_mm_remember(int[] key, int variant, int splits, int group) -> ()")
_FRAGMENT.define("scaled_mm_choice(int[] key) -> int[]")
_FRAGMENT.define("scaled_mm_variants(int b_code, bool promoting) -> int[]")
_FRAGMENT.define("stream_multiprocessors(Tensor like) -> int")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKind:
    """Products that are cut alike: ``batch`` matrices of ``rows`` x ``columns`` results, sums of ``depth`` terms.

    ``a`` and ``b`` are the operands' codes, ``"INT8"``, ``"E4M3"`` or ``"E5M2"``; an element of the result has 2 or 4
    ``result_bytes``. ``promoting`` sums blocks of 128 terms separately (block scales, accurate FP8). The stream may use
    so many ``multiprocessors``: those of the card, or of a partition of it.
    """

    a: str
    b: str
    result_bytes: int
    promoting: bool
    batch: _Count
    rows: _Count
    columns: _Count
    depth: _Count
    multiprocessors: _Count

    def __post_init__(self) -> None:
        for name, allowed in (("a", _CODE_NAMES), ("b", _CODE_NAMES), ("result_bytes", (2, 4))):
            if getattr(self, name) not in allowed:
                raise UnsupportedError(
                    f"product kind: {name}={getattr(self, name)!r}; allowed are {', '.join(map(str, allowed))}"
                )
        check_fields(self, "product kind", error=UnsupportedError)

    def key(self) -> list[int]:
        """The numbers that the compiled code looks choices up by."""
        a, b, *numbers = (getattr(self, entry.name) for entry in fields(self))
        return [_CODE_NAMES.index(a), _CODE_NAMES.index(b), *map(int, numbers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a product is cut.

    Attributes:
        variant: Index of the tile in ``csrc/cuda/matmul_sm90_tiles.h``.
        splits: Parts of the contraction that are summed separately, then added.
        group: Rows of tiles that are walked together.
    """

    variant: int
    splits: _Count = 1
    group: _Count = 8

    def __post_init__(self) -> None:
        check_fields(self, "choice of a tile", error=UnsupportedError)


def kind_of(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, promoting: bool = False) -> ProductKind:
    """The kind of a product of CUDA codes (.., N, K) and (.., M, K) on the current stream."""
    if a.dtype not in CODES or b.dtype not in CODES:
        raise UnsupportedError(f"a product of {a.dtype} and {b.dtype}; allowed are {', '.join(map(str, CODES))}")
    activate()
    return ProductKind(
        a=CODES[a.dtype],
        b=CODES[b.dtype],
        result_bytes=out_dtype.itemsize,
        promoting=promoting,
        batch=a.shape[0] if a.dim() == 3 else 1,
        rows=a.shape[-2],
        columns=b.shape[-2],
        depth=a.shape[-1],
        multiprocessors=torch.ops.qsync_opt.stream_multiprocessors(a),
    )


def device_name(index: int | None = None) -> str:
    """Name of a card as its tables' files have it."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(index).lower()).strip("-")


def cache_file() -> Path:
    """Where ``tune`` keeps choices for the current card."""
    return builder.cache_folder() / f"matmul-{device_name()}.json"


def read_choices(path: Path) -> dict[ProductKind, Choice]:
    """Read a table of choices.

    Raises:
        ProblemError: The file cannot be used; the text names the place.
    """
    data = Fields(read_json(path, [CHOICES_FORMAT]), str(path))
    data.version(CHOICES_FORMAT)
    choices: dict[ProductKind, Choice] = {}
    for number, entry in enumerate(data.sequence("choices")):
        row = Fields(entry, f"{path}: choices[{number}]")
        numbers = {name: row.take(name) for name in _CHOICE_NUMBERS}
        others = {name: row.take(name) for name in row if name not in numbers}
        try:
            choices[decode(ProductKind, others, row.where)] = decode(Choice, numbers, row.where)
        except UnsupportedError as error:
            raise ProblemError(f"{row.where}: {error}") from error
    data.finish()
    return choices


def write_choices(path: Path, choices: Mapping[ProductKind, Choice]) -> None:
    """Write a table of choices, sorted, whole or not at all."""
    entries = [{**asdict(kind), **asdict(choice)} for kind, choice in choices.items()]
    entries.sort(key=lambda entry: tuple(entry.values()))
    write_json(path, {"format": CHOICES_FORMAT, "choices": entries})


def remember(kind: ProductKind, choice: Choice | None) -> None:
    """Use a choice, or the estimate, for products of a kind from now on, in this process."""
    numbers = (-1, 1, 1) if choice is None else (choice.variant, choice.splits, choice.group)
    torch.ops.qsync_opt.scaled_mm_remember(kind.key(), *numbers)


def choice_of(kind: ProductKind) -> Choice | None:
    """Current choice for products of a kind; None where the compiled code has only one tile."""
    activate()
    numbers = torch.ops.qsync_opt.scaled_mm_choice(kind.key())
    return Choice(**dict(zip(_CHOICE_NUMBERS, numbers, strict=True))) if numbers else None


def variants(b: str, *, promoting: bool) -> list[int]:
    """Indices of the tiles that products have whose second operand has codes ``b``."""
    activate()
    indices: list[int] = torch.ops.qsync_opt.scaled_mm_variants(_CODE_NAMES.index(b), promoting)
    return indices


_LOADED: list[bool] = []


@torch.compiler.assume_constant_result
def activate() -> bool:
    """Whether the compiled products run (else the plain ones do), loaded with the tables for this machine's card."""
    if not _LOADED:
        compiled = library.activate("matmul")
        if compiled:
            for path in (TABLES / f"matmul-{device_name()}.json", cache_file()):
                if path.is_file():
                    for kind, choice in read_choices(path).items():
                        remember(kind, choice)
        _LOADED.append(compiled)
    return _LOADED[0]
