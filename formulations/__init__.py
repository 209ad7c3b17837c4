"""Which choice is best: formulations that turn a problem into a plan with a bound; never torch.

`Formulation` is the contract; each use has a folder, and the registry reaches formulations by name.
"""

__all__ = []
