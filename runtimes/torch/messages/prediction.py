"""What an epoch under a plan takes, from epochs that were measured under other widths.

epoch = computation + packing and unpacking + what of the exchanges nothing hides. Exchanges are those of the problem
(links and hidden times of this job), packing is timed for each width, and computation is what remains of a measured
step without the other two. A processor that has waited computes more slowly for a while: its caches are cold, and a
virtual machine lends it to others meanwhile. What steps in some widths took is therefore interpolated by how long
workers wait in them.
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
        exposed_s: Seconds for which it waits for messages, as the problem says.
        compute_s: Seconds without packing, unpacking and messages.
        codec_s: Seconds of packing and unpacking that do not depend on widths.
        codecs: What the rest of packing and unpacking takes on each worker.
    """

    exposed_s: float
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


def predict_epoch(problem: Problem, plan: Plan, *times: StepTimes) -> PredictedEpoch:
    """The time of an epoch under a plan.

    Args:
        problem: Of this job.
        plan: Of this problem.
        times: Of steps in some widths, at least one: in narrow and in wide ones where links are slow. Computation and
            packing are interpolated between those that wait shorter and longer than the plan, and are those of the
            nearest where there is none.

    Raises:
        ProblemError: The plan is not of this problem, or has a width in which packing was not measured.
    """
    evaluation = evaluate(problem, plan)
    exposed_s = evaluation.waiting_ns / 1e9
    ordered = sorted(times, key=lambda each: each.exposed_s)
    measured_s = [each.exposed_s for each in ordered]
    compute_s = float(np.interp(exposed_s, measured_s, [each.compute_s for each in ordered]))
    codec_s = float(np.interp(exposed_s, measured_s, [each.codec_s for each in ordered]))
    codec_s += 1e-9 * max(codec_by_worker(problem, plan, ordered[0].codecs).values(), default=0.0)
    return PredictedEpoch(compute_s, codec_s, exposed_s, evaluation.time_ns / 1e9)


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
