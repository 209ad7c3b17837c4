import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# With the repository root on the path, its folder kernels/ would shadow an installed package of that name.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
