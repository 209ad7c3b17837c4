"""One self-contained HTML page about a plan: what was decided, why, what it costs and what else was possible.

Core only: no torch and no solver; fronts and bounds are reached by a method's name.
"""

from qsync_opt.report.contents import Measured, Report, load_measured, make_report
from qsync_opt.report.page import report_html, write_report

__all__ = ["Measured", "Report", "load_measured", "make_report", "report_html", "write_report"]
