"""The build of the CUDA sources, once per source, target and toolkit, and the loading of the libraries.

`library` loads a compiled unit; ``python -m qsync_opt.kernels.compilation`` builds all of them ahead of time.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.compilation import builder, host, library
    from qsync_opt.kernels.compilation.builder import UNITS
    from qsync_opt.kernels.compilation.compiler import find_toolchain
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["UNITS", "builder", "find_toolchain", "host", "library"]
