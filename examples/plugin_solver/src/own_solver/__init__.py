"""An example plug-in for qsync-opt: a solver from outside its package."""
