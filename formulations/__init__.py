"""Formulations: methods that turn a problem into a plan with a bound, without torch.

`base.Formulation` is the contract; each use has a folder, and the registry reaches formulations by name.
"""

__all__ = []
