"""Sensitivity of training to each operator's precision: measured statistics, variances of rounding, indicators.

`sensitivities` turns collected statistics into a `SensitivityTable`, the objective of a problem.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.sensitivity.indicators import FormatIndicator, Indicator, ModelKnowledge, WeightIndicator
    from qsync_opt.sensitivity.merging import merge_operators, merge_statistics
    from qsync_opt.sensitivity.rectifiers import plan_variance, plan_variance_parts, sign_change_variance
    from qsync_opt.sensitivity.rounding_variance import Noise, NoiseOptions, OperatorVariances, variances
    from qsync_opt.sensitivity.scores import sensitivities, variance_weight
    from qsync_opt.sensitivity.statistics import (
        GRADIENTS,
        OPERANDS,
        SHAPES,
        SIGN_CHANGE_RATIOS,
        Curvature,
        Gain,
        GradientNoise,
        MeasuredErrors,
        ModelStatistics,
        OperatorKind,
        OperatorStatistics,
        ProductSizes,
        RoundingFactor,
        Signal,
        TensorStatistics,
        check_loss_scale,
        load_statistics,
        save_statistics,
    )
    from qsync_opt.sensitivity.table import (
        SENSITIVITY_FORMAT,
        IndicatorKind,
        OperatorSensitivity,
        SensitivityTable,
        SensitivityValues,
    )
    from qsync_opt.sensitivity.weights import FROM_FORMATS, FROM_WEIGHTS, weight_sensitivities
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FROM_FORMATS", "FROM_WEIGHTS", "GRADIENTS", "OPERANDS", "SENSITIVITY_FORMAT", "SHAPES", "SIGN_CHANGE_RATIOS",
    "Curvature", "FormatIndicator", "Gain", "GradientNoise", "Indicator", "IndicatorKind",
    "MeasuredErrors", "ModelKnowledge", "ModelStatistics", "Noise", "NoiseOptions", "OperatorKind",
    "OperatorSensitivity", "OperatorStatistics", "OperatorVariances", "ProductSizes", "RoundingFactor",
    "SensitivityTable", "SensitivityValues", "Signal", "TensorStatistics", "WeightIndicator", "check_loss_scale",
    "load_statistics", "merge_operators", "merge_statistics", "plan_variance", "plan_variance_parts",
    "save_statistics", "sensitivities", "sign_change_variance", 
    "variance_weight", "variances", "weight_sensitivities",
]  # fmt: skip
