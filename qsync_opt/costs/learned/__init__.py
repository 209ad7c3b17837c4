"""Times of operators on devices that nobody has profiled, learned from records of measurements, with an interval.

A `CostRecord` holds measurements.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.costs.learned.devices import (
        DeviceVector,
        check_same_devices,
        reference_ns,
        sheet_vector,
        with_observed_rates,
    )
    from qsync_opt.costs.learned.features import FEATURE_VERSION, Features, feature_names, features_of
    from qsync_opt.costs.learned.fitting import (
        Rows,
        Split,
        fit_heads,
        fit_trees,
        group_keys,
        held_out_errors,
        parts,
        predict_samples,
        summary,
    )
    from qsync_opt.costs.learned.model import (
        LearnedModel,
        ModelCard,
        TimeEstimate,
        Trees,
        interval_quantile,
        load_model,
        shipped_model,
    )
    from qsync_opt.costs.learned.programs import (
        Leaf,
        LeafKind,
        Phase,
        Program,
        Workload,
        cast_program,
        programs_of,
        sum_program,
        workload_of,
    )
    from qsync_opt.costs.learned.records import (
        RECORD_FORMAT,
        CostRecord,
        Sample,
        check_times,
        load_record,
        merge_records,
        outliers,
    )
    from qsync_opt.costs.learned.source import LearnedCosts, at_quantile, has_intervals, learned_profile, with_times
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FEATURE_VERSION", "RECORD_FORMAT", "CostRecord", "DeviceVector", "Features", "Leaf", "LeafKind",
    "LearnedCosts", "LearnedModel", "ModelCard", "Phase", "Program", "Rows", "Sample", "Split", "TimeEstimate",
    "Trees", "Workload", "at_quantile", "cast_program", "check_same_devices", "check_times", "feature_names",
    "features_of", "fit_heads", "fit_trees", "group_keys", "has_intervals", "held_out_errors", "interval_quantile",
    "learned_profile", "load_model", "load_record", "merge_records", "outliers", "parts", "predict_samples",
    "programs_of", "reference_ns", "sheet_vector", "shipped_model", "sum_program", "summary", "with_observed_rates",
    "with_times", "workload_of",
]  # fmt: skip
