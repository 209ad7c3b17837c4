"""What an epoch under a plan takes, from an epoch that was measured under other widths.

epoch = computation + packing and unpacking + what of the exchanges nothing hides. Exchanges are those of the problem
(links and hidden times of this job), packing is timed for each width, and computation is what remains of a measured
step without the other two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import ProblemError
from qsync_opt.messages import Plan, Problem, evaluate
from qsync_opt.runtimes.torch.messages.links import Codec


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step takes beside its exchanges, of the slowest worker.

    Attributes:
        compute_s: Seconds without packing, unpacking and messages.
        codec_s: Seconds of packing and unpacking that do not depend on widths.
        codecs: What the rest of packing and unpacking takes on each worker.
    """

    compute_s: float
    codec_s: float
    codecs: tuple[Codec, ...]


@dataclass(frozen=True, slots=True)
class PredictedEpoch:
    """Seconds of an epoch under a plan: its parts, all exchanges (some of them hidden), and the sum of the parts."""

    compute_s: float
    codec_s: float
    exposed_s: float
    exchange_s: float

    @property
    def epoch_s(self) -> float:
        """Computation, packing and exposed exchanges."""
        return self.compute_s + self.codec_s + self.exposed_s


def predict_epoch(problem: Problem, plan: Plan, times: StepTimes) -> PredictedEpoch:
    """The time of an epoch under a plan.

    Raises:
        ProblemError: The plan is not of this problem, or has a width in which packing was not measured.
    """
    evaluation = evaluate(problem, plan)
    codec_s = times.codec_s + 1e-9 * max(codec_by_worker(problem, plan, times.codecs).values(), default=0.0)
    return PredictedEpoch(times.compute_s, codec_s, evaluation.waiting_ns / 1e9, evaluation.time_ns / 1e9)


def codec_by_worker(problem: Problem, plan: Plan, codecs: Sequence[Codec]) -> dict[int, float]:
    """Worker to nanoseconds of packing what it sends and unpacking what it receives, as far as widths decide."""
    pairs = [(each, pair) for each in problem.exchanges for pair in each.pairs]
    widths = [chosen for each in problem.exchanges for group in plan.bits[each.name] for chosen in group]
    spent = {worker: 0.0 for _, pair in pairs for worker in (pair.source, pair.target)}
    for (exchange, pair), chosen in zip(pairs, widths, strict=True):
        for worker, side in ((pair.source, 0), (pair.target, 1)):
            codec = codecs[worker]
            for width, count in zip(*np.unique(chosen, return_counts=True), strict=True):
                if int(width) not in codec.number_ns:
                    measured = ", ".join(map(str, codec.number_ns))
                    raise ProblemError(
                        f"the plan has messages of {width} bits, but packing was measured in {measured}; plan with a "
                        "menu that has it"
                    )
                spent[worker] += codec.call_ns[side] + codec.number_ns[int(width)][side] * exchange.dim * int(count)
    return spent
