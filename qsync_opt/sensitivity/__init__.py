"""How much each operator's precision harms training: statistics of a model, variances of rounding, indicators.

`sensitivities` turns collected statistics into a `SensitivityTable`, which a problem holds as its objective.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.sensitivity.baselines import fisher_score, hessian_increase, random_score, weight_variance
    from qsync_opt.sensitivity.indicators import FormatIndicator, Indicator, ModelKnowledge, WeightIndicator
    from qsync_opt.sensitivity.merging import merge_operators, merge_statistics
    from qsync_opt.sensitivity.propagation import Distances, Effect, Propagation, distances
    from qsync_opt.sensitivity.rectifiers import flipped_variance, plan_variance, plan_variance_parts
    from qsync_opt.sensitivity.rounding_variance import (
        Noise,
        NoiseOptions,
        OperatorVariances,
        overflow_reason,
        variances,
    )
    from qsync_opt.sensitivity.scores import horizon_of, sensitivities
    from qsync_opt.sensitivity.statistics import (
        FLIP_RATIOS,
        GRADIENTS,
        OPERANDS,
        SHAPES,
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
        statistics_from_json,
        statistics_to_json,
    )
    from qsync_opt.sensitivity.table import IndicatorKind, OperatorSensitivity, SensitivityTable, SensitivityValues
    from qsync_opt.sensitivity.weights import FROM_FORMATS, FROM_WEIGHTS, weight_sensitivities
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FLIP_RATIOS",
    "FROM_FORMATS",
    "FROM_WEIGHTS",
    "GRADIENTS",
    "OPERANDS",
    "SHAPES",
    "Curvature",
    "Distances",
    "Effect",
    "FormatIndicator",
    "Gain",
    "GradientNoise",
    "Indicator",
    "IndicatorKind",
    "MeasuredErrors",
    "ModelKnowledge",
    "ModelStatistics",
    "Noise",
    "NoiseOptions",
    "OperatorKind",
    "OperatorSensitivity",
    "OperatorStatistics",
    "OperatorVariances",
    "ProductSizes",
    "Propagation",
    "RoundingFactor",
    "SensitivityTable",
    "SensitivityValues",
    "Signal",
    "TensorStatistics",
    "WeightIndicator",
    "check_loss_scale",
    "distances",
    "fisher_score",
    "flipped_variance",
    "hessian_increase",
    "horizon_of",
    "load_statistics",
    "merge_operators",
    "merge_statistics",
    "overflow_reason",
    "plan_variance",
    "plan_variance_parts",
    "random_score",
    "save_statistics",
    "sensitivities",
    "statistics_from_json",
    "statistics_to_json",
    "variances",
    "weight_sensitivities",
    "weight_variance",
]
