import sys
from pathlib import Path

# The helpers of this folder are modules that its tests and its long mode share.
sys.path.append(str(Path(__file__).resolve().parent))
