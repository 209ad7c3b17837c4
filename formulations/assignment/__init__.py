"""The neutral core: choose one label per node, under additive loads, pairwise costs and nested limits."""
