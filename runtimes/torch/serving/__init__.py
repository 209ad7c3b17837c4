"""Serving a plan with PyTorch: packed weights, paged caches, stages as processes, continuous batching, an endpoint.

Llama, Mistral, Qwen 2 and 3, and Gemma 3 (text) run; tokens are those of transformers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.serving.cache import PagedCache
    from qsync_opt.runtimes.torch.serving.choosing import choose
    from qsync_opt.runtimes.torch.serving.config import DecoderConfig, Rotary, config_from_json, read_config
    from qsync_opt.runtimes.torch.serving.groups import Attention, Mlp
    from qsync_opt.runtimes.torch.serving.packing import (
        GROUP,
        SCHEMES,
        PackedWeight,
        linear,
        pack,
        scheme_bits,
        unpack,
    )
    from qsync_opt.runtimes.torch.serving.pipeline import Generation, Pipeline, generate_here, microbatch_rows
    from qsync_opt.runtimes.torch.serving.stage import StageModel, check_plan, group_names
    from qsync_opt.runtimes.torch.serving.steps import PAGE, Choice, Layout, PageStore, Step
    from qsync_opt.runtimes.torch.serving.weights import (
        GgufSource,
        SafetensorsSource,
        StateSource,
        WeightSource,
        open_model,
    )
    from qsync_opt.runtimes.torch.serving.workers import (
        LocalWorkers,
        StageError,
        StageOptions,
        StageProcesses,
        Workers,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "GROUP", "PAGE", "SCHEMES", "Attention", "Choice", "DecoderConfig", "Generation", "GgufSource", "Layout",
    "LocalWorkers", "Mlp", "PackedWeight", "PageStore", "PagedCache", "Pipeline", "Rotary", "SafetensorsSource",
    "StageError", "StageModel", "StageOptions", "StageProcesses", "StateSource", "Step", "WeightSource", "Workers",
    "check_plan", "choose", "config_from_json", "generate_here", "group_names", "linear", "microbatch_rows",
    "open_model", "pack", "read_config", "scheme_bits", "unpack",
]  # fmt: skip
