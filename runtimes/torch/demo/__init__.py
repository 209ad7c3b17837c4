"""``qsync-opt demo``: a small model trained by two workers under a plan, every step shown.

`run_demo` is what the command calls.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.demo.model import Batches, Gpt, standard_library_text
    from qsync_opt.runtimes.torch.demo.report import others_words, result_json
    from qsync_opt.runtimes.torch.demo.run import run_demo
    from qsync_opt.runtimes.torch.demo.settings import INFERENCE, TRAINER, DemoOptions, GptConfig
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "INFERENCE", "TRAINER", "Batches", "DemoOptions", "Gpt", "GptConfig", "others_words", "result_json", "run_demo",
    "standard_library_text",
]  # fmt: skip
