"""Where a plan is profiled and applied: adapters of training frameworks. Never loads a solver."""
