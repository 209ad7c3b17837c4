"""Precision plans for synchronous data-parallel training on hybrid GPU clusters."""

__version__ = "0.1.0"
