"""PyTorch: capture, statistics, profile and application of plans under DistributedDataParallel."""
