"""Times of operators on devices that nobody has profiled, learned from records of measurements, with an interval.

A `CostRecord` holds measurements.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.costs.learned.corrections import Correction
    from qsync_opt.costs.learned.devices import (
        DeviceVector,
        check_same_devices,
        reference_ns,
        sheet_vector,
        with_observed_rates,
    )
    from qsync_opt.costs.learned.fitting import (
        Rows,
        Split,
        fit_laws,
        group_keys,
        held_out_errors,
        parts,
        predict_samples,
        summary,
    )
    from qsync_opt.costs.learned.laws import class_name, fit_law, kernel_of
    from qsync_opt.costs.learned.model import (
        LearnedModel,
        Level,
        ModelCard,
        TimeEstimate,
        interval_quantile,
        law_name,
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
    from qsync_opt.costs.learned.source import (
        LearnedCosts,
        at_quantile,
        has_intervals,
        known_device,
        learned_profile,
        with_times,
    )
    from qsync_opt.costs.learned.terms import FEATURE_VERSION, TERMS, terms_of
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FEATURE_VERSION", "RECORD_FORMAT", "TERMS", "Correction", "CostRecord", "DeviceVector", "Leaf", "LeafKind",
    "LearnedCosts", "LearnedModel", "Level", "ModelCard", "Phase", "Program", "Rows", "Sample", "Split",
    "TimeEstimate", "Workload", "at_quantile", "cast_program", "check_same_devices", "check_times", "class_name",
    "fit_law", "fit_laws", "group_keys", "has_intervals", "held_out_errors", "interval_quantile", "kernel_of",
    "known_device", "law_name", "learned_profile", "load_model", "load_record", "merge_records", "outliers",
    "parts", "predict_samples", "programs_of", "reference_ns", "sheet_vector", "shipped_model", "sum_program",
    "summary", "terms_of", "with_observed_rates", "with_times", "workload_of",
]  # fmt: skip
