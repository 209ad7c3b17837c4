"""Costs of packing and unpacking on devices where they were not measured, from learned times of casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync_opt.costs import MI_ELEMENTS, estimated_costs, fit_cost
from qsync_opt.costs.learned import DeviceVector, LearnedModel, cast_program, shipped_model
from qsync_opt.errors import ProblemError
from qsync_opt.io import ESTIMATES_KEY
from qsync_opt.messages.problem import Pair, Problem

_SIZES = (2**12, 2**16, 2**20, 2**23)
"""Numbers in the rows whose casts are predicted."""
_CAST_BYTES = 6
"""Bytes that a cast between FP32 and BF16 moves for each number."""


def with_learned_packing(
    problem: Problem, devices: Mapping[int, DeviceVector], learned: LearnedModel | None = None
) -> Problem:
    """The problem with estimated costs of packing and unpacking on some workers; those of others stay.

    A byte more of a message is a byte more that packing writes, or unpacking reads, and takes as long as a byte that a
    cast from FP32 to BF16, or back, moves: the learned time per byte over several sizes, or that of the device's
    memory where the model has no law for casts. How long the arithmetic of narrow widths takes is not known, and
    counted as nothing.

    Args:
        problem: Whose pairs name workers by number. Its limit stays as it is.
        devices: Worker to its device; `qsync_opt.costs.learned.known_device` has one by name.
        learned: None: the model that comes with the package.

    Returns:
        A problem whose extension key ``x-estimates`` names the source for each of these workers, as its plans do.

    Raises:
        ProblemError: The problem has no such worker.
        NotReadyError: The package has no model.

    Source: ours.
    """
    learned = learned or shipped_model()
    workers = sorted({end for e in problem.exchanges for pair in e.pairs for end in (pair.source, pair.target)})
    for worker in devices:
        if worker not in workers:
            raise ProblemError(
                f"worker is {worker!r}, but problem {problem.name!r} has {', '.join(map(str, workers)) or 'none'}; "
                "name one of these"
            )
    costs = {worker: _ns_per_byte(vector, learned) for worker, vector in devices.items()}

    def priced(pair: Pair) -> Pair:
        pack, unpack = costs.get(pair.source), costs.get(pair.target)
        return replace(
            pair,
            pack_ns_per_byte=pair.pack_ns_per_byte if pack is None else pack[0],
            unpack_ns_per_byte=pair.unpack_ns_per_byte if unpack is None else unpack[1],
        )

    exchanges = tuple(
        replace(e, rounds=tuple(tuple(priced(pair) for pair in group) for group in e.rounds)) for e in problem.exchanges
    )
    sources = {f"packing on worker {worker}": _source(vector, learned) for worker, vector in devices.items()}
    note = problem.extras.get((ESTIMATES_KEY,), {})
    new = estimated_costs({**note.get("costs", {}), **sources}).get((ESTIMATES_KEY,), {})
    extras = {**problem.extras, (ESTIMATES_KEY,): {**note, **new}} if sources else problem.extras
    return replace(problem, exchanges=exchanges, extras=extras)


def _ns_per_byte(vector: DeviceVector, learned: LearnedModel) -> tuple[float, float]:
    """Nanoseconds for each byte that is packed, and that is unpacked; never below the roofline."""
    least = 1e9 / max(vector.bandwidth_bytes_per_s, vector.cache_bytes_per_s)
    result = []
    for source, target in (("FP32", "BF16"), ("BF16", "FP32")):
        programs = [cast_program(source, target, size) for size in _SIZES]
        if learned.knows(programs[0], vector):
            times = [estimate.ns for estimate in learned.predict(programs, vector)]
            fit = fit_cost(zip(_SIZES, times, strict=True))
            result.append(max(least, fit.ns_per_mi_elements / MI_ELEMENTS / _CAST_BYTES))
        else:
            result.append(1e9 / vector.bandwidth_bytes_per_s)
    return result[0], result[1]


def _source(vector: DeviceVector, learned: LearnedModel) -> str:
    known = [learned.knows(cast_program(*pair, 1), vector) for pair in (("FP32", "BF16"), ("BF16", "FP32"))]
    if not all(known):
        return f"roofline of {vector.name}"
    return f"learned for {vector.name} from casts; unlike the training data, which has no packing"
