"""What people look at: the HTML report of a plan, figures, pandas tables and notebook views.

Needs neither torch nor a solver; pandas and matplotlib are optional.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.report.contents import Measured, MeasuredDevice, Report, check_front, load_measured, make_report
    from qsync_opt.report.decoding import decoding_report_html, write_decoding_report
    from qsync_opt.report.display import levels
    from qsync_opt.report.figures import front_svg
    from qsync_opt.report.page import report_html, write_report
    from qsync_opt.report.serving import serving_report_html, write_serving_report
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Measured", "MeasuredDevice", "Report", "check_front", "decoding_report_html", "front_svg", "levels",
    "load_measured", "make_report", "report_html", "serving_report_html", "write_decoding_report", "write_report",
    "write_serving_report",
]  # fmt: skip
