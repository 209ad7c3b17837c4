"""Cost models: sources of profiles, measured ones or roofline estimates."""

from __future__ import annotations

from typing import Protocol

from qsync_opt.cluster import DeviceType, data_sheet
from qsync_opt.costs.profile import DeviceProfile, load_profile
from qsync_opt.costs.roofline import Assumptions, roofline_profile
from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph


class CostModel(Protocol):
    """A source of profiles."""

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Costs of a model on a device type of the cluster file.

        Returns:
            A profile of this graph with the precisions of ``device``. If it was not measured, its option
            ``estimated_by`` says so.

        Raises:
            ProblemError: There is no profile of this device.
            UnsupportedError: The cost model does not know such a device.
        """


class ProfileCosts:
    """Measured profiles, from the files that the cluster file names."""

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Read the profile; see `CostModel.profile`."""
        if device.profile is None:
            raise ProblemError(
                f"device type {device.name!r} has no profile; add profile: FILE in the cluster file, or estimate its "
                "costs with the cost model 'roofline'"
            )
        profile = load_profile(device.profile)
        profile.check_graph(graph)
        return profile


class RooflineCosts:
    """Estimates from the data sheet of a device type's ``hardware``, or of the GPU that it is named after."""

    def __init__(self, assumptions: Assumptions | None = None) -> None:
        self._assumptions = assumptions

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Estimate the profile; see `CostModel.profile`."""
        return roofline_profile(graph, data_sheet(device.hardware or device.name), assumptions=self._assumptions)
