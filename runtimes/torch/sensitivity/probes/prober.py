"""Everything that is found of a batch by differentiating its step twice; of some samples, where they are enough."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from qsync_opt.errors import QSyncError, first_line
from qsync_opt.model.graph import OpGraph
from qsync_opt.runtimes.torch.sensitivity.batch_slices import parts_of
from qsync_opt.runtimes.torch.sensitivity.probes.curvature import probe_curvatures
from qsync_opt.runtimes.torch.sensitivity.probes.gradient import (
    Probed,
    ProbeMemoryError,
    probe_gains,
    rectifies,
    wanted_of,
)
from qsync_opt.runtimes.torch.sensitivity.probes.probe_parts import (
    PASSES_OF_PARTS,
    NotDivisibleError,
    PartLoss,
    probe_parts,
)
from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import PASSES, Seen, noisy_passes
from qsync_opt.sensitivity.statistics import Curvature, ModelStatistics

_LOGGER = logging.getLogger(__name__)


class Prober:
    """Probes one batch; what noise does at rectifiers is looked at once for all kinds of gains."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        found: ModelStatistics,
        graph: OpGraph | None,
        seed: int,
        *,
        divide: bool = True,
    ) -> None:
        """Prepare.

        Args:
            model: The model.
            run: From the model and a batch to the loss.
            batch: To be probed.
            found: What operators do in it.
            graph: Limits the operators.
            seed: Of random vectors.
            divide: Whether some samples may stand for all.
        """
        self._model, self._graph, self._seed = model, graph, seed
        self._whole = functools.partial(run, model, batch)
        self._found = found
        parts = (parts_of(model, batch) if divide else None) or ()
        self._parts = [PartLoss(functools.partial(run, model, part.batch), part.share, part.chosen) for part in parts]
        self._seen: dict[tuple[int, bool], Seen] = {}

    def gains(self, probes: int, *, adaptive: Mapping[int, Tensor] | None = None) -> Probed:
        """Gains from so many random vectors.

        Args:
            probes: 0 for none.
            adaptive: Root mean squares of the batch's gradients; then gains are those of ``adaptive`` probes.

        Raises:
            ModelError: As ``probe_gains``.
        """
        if not probes:
            return Probed({}, {}, {})
        shift = adaptive is None
        given: dict[str, Any] = {
            "graph": self._graph,
            "probes": probes,
            "seed": self._seed,
            "adaptive": not shift,
            "roots": adaptive,
        }
        if self._parts:
            try:
                seen = self._noise(PASSES_OF_PARTS, shift=False)
                return probe_parts(self._model, self._parts, self._found, seen=seen, **given)
            except ProbeMemoryError:
                raise  # all samples would need even more
            except (NotDivisibleError, QSyncError, RuntimeError, ValueError, TypeError, LookupError) as refused:
                _LOGGER.info("the batch is probed as a whole: %s", first_line(refused)[:400])
            self._parts = []
        return probe_gains(self._model, self._whole, seen=self._noise(PASSES, shift=shift), **given)

    def curvatures(self, probes: int) -> dict[str, dict[str, Curvature]]:
        """Traces from so many random vectors, 0 for none.

        Raises:
            ModelError: As ``probe_curvatures``.
        """
        if not probes:
            return {}
        return probe_curvatures(self._model, self._whole, graph=self._graph, probes=probes, seed=self._seed)

    def _noise(self, passes: int, *, shift: bool) -> Seen:
        if not rectifies(self._graph):
            return Seen({}, 0.0)
        known = self._seen.get((passes, shift)) or self._seen.get((passes, True))
        if known is None:
            wanted = wanted_of(self._graph)
            known = noisy_passes(self._model, self._whole, wanted, shift=shift, passes=passes)
            self._seen[passes, shift] = known
        return known
