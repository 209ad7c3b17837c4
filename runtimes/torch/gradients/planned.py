"""What compressed reductions of all kinds share: a plan that the ranks agree on, and what is noted of their steps."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.gradients import BucketStatistics, GradientScheme, Plan, RecordedReductions, scheme
from qsync_opt.runtimes.torch.ddp import require_agreement, together
from qsync_opt.runtimes.torch.gradients.records import StepRecords

ADVICE = "give all ranks the same plan, seed and implementation"


class PlannedReductions:
    """Reductions bucket by bucket under a plan; ``elements`` are the sizes of the buckets, once a step has shown them.

    Args:
        workers: That reduce together.
        seed: Of the random rounding, the same on all ranks.
        group: Of the messages in which ranks agree; None: the default one.
    """

    what: ClassVar[str]
    """Is compressed, for errors."""
    layout: ClassVar[str]
    """Where the buckets come from, for errors."""

    def __init__(self, *, workers: int, seed: int, group: Any = None) -> None:
        self.workers = workers
        self.group = group
        self.elements: tuple[int, ...] | None = None
        self._seed = seed
        self._records = StepRecords()
        self._schemes: tuple[GradientScheme, ...] | GradientScheme = scheme("FP32")
        self._plan: Plan | None = None

    def use(self, plan: Plan | GradientScheme | str) -> None:
        """Reduce by another plan from the next step on; every rank must call it.

        Raises:
            ProblemError: The plan was made for another number of workers.
            UnsupportedError: An unknown scheme, or one that these reductions cannot carry out.
            ModelError: The ranks' plans differ.
            NotReadyError: On the ranks whose plan is right, if that of another is not.
        """
        chosen = together(lambda: self._checked(plan), self.group)
        agreed = {
            "schemes": [each.name for each in chosen] if isinstance(chosen, tuple) else chosen.name,
            "elements": list(plan.elements) if isinstance(plan, Plan) and plan.elements is not None else None,
            "seed": self._seed,
        }
        require_agreement(f"the compression of {self.what}", agreed, ADVICE, self.group)
        self._schemes, self._plan = chosen, plan if isinstance(plan, Plan) else None

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Collect statistics of all steps in the block, which are reduced plainly; `statistics` returns them."""
        return self._records.sample()

    def statistics(self) -> tuple[BucketStatistics, ...]:
        """Statistics of each bucket, the mean of the sampled steps.

        Raises:
            NotReadyError: No step was sampled after the buckets were settled.
        """
        return self._records.statistics()

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Note when each bucket is ready, begins and ends in all steps of the block; `recorded` returns it."""
        return self._records.record()

    def recorded(self) -> RecordedReductions:
        """What `recording` noted on this rank; its first step only says when the second one begins.

        Raises:
            NotReadyError: Fewer than two steps were recorded after the buckets were settled, or there is one worker.
        """
        return self._records.recorded(self.workers, self.elements)

    def _checked(self, plan: Plan | GradientScheme | str) -> tuple[GradientScheme, ...] | GradientScheme:
        """The schemes of a plan, or the one of all buckets."""
        if not isinstance(plan, Plan):
            chosen = scheme(plan)
            self._check_scheme(chosen)
            return chosen
        if plan.workers is not None and plan.workers != self.workers:
            raise ProblemError(
                f"the plan was made for {plan.workers} workers, but {self.workers} reduce here: scales and variances "
                "depend on the number; make a plan for this job"
            )
        schemes = tuple(scheme(name) for name in plan.schemes.values())
        for each in schemes:
            self._check_scheme(each)
        return schemes

    def _check_scheme(self, each: GradientScheme) -> None:
        if not each.supports(self.workers):
            raise UnsupportedError(
                f"scheme {each.name!r} would overflow with {self.workers} workers; take one of more bits, or a "
                "two-shot scheme"
            )

    def _scheme_of(self, index: int, elements: int) -> GradientScheme:
        """The scheme of a bucket, which must be one of those that the plan was made for.

        Raises:
            ModelError: There are more buckets, or this one has another size.
        """
        if not isinstance(self._schemes, tuple):
            return self._schemes
        advice = f"make a plan for the buckets of {self.layout}"
        if index >= len(self._schemes):
            raise ModelError(f"a bucket number {index} is reduced, but the plan has {len(self._schemes)}; {advice}")
        sizes = None if self._plan is None else self._plan.elements
        if sizes is not None and sizes[index] != elements:
            raise ModelError(
                f"bucket {index} has {elements} elements, but the plan was made for {sizes[index]}; {advice}"
            )
        return self._schemes[index]
