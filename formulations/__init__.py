"""Which precision each operator gets: formulations over a Problem. Never loads torch."""
