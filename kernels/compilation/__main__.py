"""Compile the CUDA kernels ahead of time: ``python -P -m qsync_opt.kernels.compilation``."""

import sys

from qsync_opt.kernels.compilation.builder import main

sys.exit(main())
