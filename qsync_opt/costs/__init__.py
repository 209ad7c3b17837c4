"""Costs of operators on devices: measured profiles and roofline estimates, with intervals and sources of figures.

A `DeviceProfile` holds the times and sizes; a `CostModel` is a source of profiles.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.costs.profile import (
        ESTIMATE_OPTION,
        FP32_SHARE_OPTION,
        MEASURED_OPTION,
        MI_ELEMENTS,
        CostFit,
        CostModel,
        DeviceIdentity,
        DeviceProfile,
        IterationCheck,
        IterationOverhead,
        MeasuredCost,
        OptimizerCost,
        ProfileCosts,
        estimate_extras,
        estimate_lines,
        estimated_by,
        estimated_costs,
        fit_cost,
        load_profile,
    )
    from qsync_opt.costs.roofline import Assumptions, RooflineCosts, fit_assumptions, roofline_profile
    from qsync_opt.costs.scaling import scale_costs
    from qsync_opt.costs.uncertainty import (
        CostSource,
        Estimate,
        cast_cost,
        layer_cost,
        operator_cost,
        total_cost,
    )
    from qsync_opt.io import ESTIMATES_KEY
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ESTIMATES_KEY", "ESTIMATE_OPTION", "FP32_SHARE_OPTION", "MEASURED_OPTION", "MI_ELEMENTS", "Assumptions",
    "CostFit", "CostModel", "CostSource", "DeviceIdentity", "DeviceProfile", "Estimate", "IterationCheck",
    "IterationOverhead", "MeasuredCost", "OptimizerCost", "ProfileCosts", "RooflineCosts", 
    "cast_cost", "estimate_extras", "estimate_lines", "estimated_by", "estimated_costs", "fit_assumptions",
    "fit_cost", "layer_cost", "load_profile", "operator_cost", "roofline_profile", "scale_costs", "total_cost",
]  # fmt: skip
