"""What a lookup leaves behind: a product whose first operand is one-hot, hence exact."""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.numerics.rounding import Granularity, Rounding
from qsync_opt.runtimes.torch.sensitivity.errors import stacked_errors
from qsync_opt.runtimes.torch.sensitivity.records.operator import OperatorRecord
from qsync_opt.runtimes.torch.sensitivity.records.summary import INTEGER_KINDS, SCALED_KINDS
from qsync_opt.runtimes.torch.sensitivity.reductions import mean, norm, total
from qsync_opt.sensitivity.statistics import ProductSizes

_TABLE_DIMS = {Granularity.CHANNEL: (0,), Granularity.ROW: (1,)}


def measure_lookup(record: OperatorRecord, table: Tensor, indices: Tensor, padding: int | None) -> None:
    """Everything about a lookup that its forward pass can tell: a product with a one-hot first operand."""
    size = ProductSizes(products=1, rows=indices.numel(), contraction=table.shape[0], columns=table.shape[1])
    record.products = (size,)
    one = torch.ones((), dtype=torch.float64, device=table.device)
    record.elements["first"] = size.rows * size.contraction
    record.put("first.greatest", one)
    record.put("first.square_sum", one * size.rows)
    for granularity in Granularity:
        record.put(f"first.amax.{granularity}", one)
    for rounding in Rounding:  # zeros and ones are exact in every format
        names = tuple(f"first.{kind}.{rounding}" for kind in SCALED_KINDS)
        record.found.append((names, one.new_zeros(len(names))))
    used = indices.reshape(-1)
    rows = table[used]
    record.put("xw/floating", total(rows.square()))
    record.put("second.norm", norm(table))
    amaxes = record.amaxes("second", table, _TABLE_DIMS)
    step = max(1, min(table.shape[0] // 8, table.numel() // record.sample))
    row_amax = amaxes[Granularity.ROW]
    some = amaxes | {Granularity.ROW: row_amax[::step]}
    record.keep("second", SCALED_KINDS, stacked_errors(table[::step], SCALED_KINDS, some), table[::step])
    if step > 1:
        record.put("second.sample.row", mean(some[Granularity.ROW].square()))
    step = max(1, rows.numel() // record.sample)
    taken = amaxes | {Granularity.ROW: row_amax[used[::step]]}
    errors = stacked_errors(rows[::step], INTEGER_KINDS, taken).stochastic
    totals = errors.flatten(1).sum(1, dtype=torch.float64) * (used.numel() / len(rows[::step]))
    record.found.append((tuple(f"xw/second/{kind.partition('/')[2]}" for kind in INTEGER_KINDS), totals))
    record.counted = None if padding is None else (used != padding)
