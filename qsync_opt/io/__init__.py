"""Files, JSON, units, progress, and the cache of measurements.

Every file of the package is read with checks and written atomically through these functions.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.io.cache import MeasurementCache, default_cache_folder
    from qsync_opt.io.codec import (
        LARGEST_INTEGER,
        Fields,
        Json,
        Name,
        check_fields,
        check_integer,
        check_member,
        check_name,
        check_number,
        decode,
        encode,
        freeze,
        near_match,
    )
    from qsync_opt.io.documents import Document, Optimum
    from qsync_opt.io.files import check_writable, read_bounded, read_text, write_bytes, write_text
    from qsync_opt.io.json_files import (
        ESTIMATES_KEY,
        Extras,
        carried_estimates,
        load_file,
        merge_extras,
        parse_json,
        read_json,
        split_extras,
        write_json,
    )
    from qsync_opt.io.progress import Report, delayed_interrupts, reporting, waiting
    from qsync_opt.io.units import (
        RATE_BYTES_PER_S,
        SIZE_BYTES,
        TIME_S,
        format_gap,
        format_memory,
        format_sensitivity,
        format_time,
        parse_quantity,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ESTIMATES_KEY", "LARGEST_INTEGER", "RATE_BYTES_PER_S", "SIZE_BYTES", "TIME_S", "Document", "Extras", "Fields",
    "Json", "MeasurementCache", "Name", "Optimum", "Report", "carried_estimates", "check_fields", "check_integer",
    "check_member", "check_name", "check_number", "check_writable", "decode", "default_cache_folder",
    "delayed_interrupts", "encode", "format_gap", "format_memory", "format_sensitivity", "format_time", "freeze",
    "load_file", "merge_extras", "near_match", "parse_json", "parse_quantity", "read_bounded", "read_json", "read_text",
    "reporting", "split_extras", "waiting", "write_bytes", "write_json", "write_text",
]  # fmt: skip
