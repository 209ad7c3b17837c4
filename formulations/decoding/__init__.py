"""Formulations of speculation plans: a search over sets of drafts, its exact form, an integer program, an oracle.

The registry reaches each formulation by its name.
"""

__all__ = []
