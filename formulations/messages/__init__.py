"""Formulations of message widths: thresholds with a bound, exact search, integer program, exhaustive, groups.

The registry reaches each formulation by its name.
"""
