"""The whole of the package on one machine: a small GPT, real text, two workers, one of them under a plan."""
