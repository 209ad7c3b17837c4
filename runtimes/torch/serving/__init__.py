"""Serving a plan with PyTorch: packed weights, paged caches, stages as processes, continuous batching, an endpoint.

Llama, Mistral, Qwen 2 and 3, and Gemma 3 (text) run; tokens are those of transformers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.serving.cache import PagedCache
    from qsync_opt.runtimes.torch.serving.choosing import choose
    from qsync_opt.runtimes.torch.serving.config import DecoderConfig, Rotary, config_from_json, read_config
    from qsync_opt.runtimes.torch.serving.engine import Engine, EngineLimits, FullError, Request, Update
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
    from qsync_opt.runtimes.torch.serving.protocol import read_ask
    from qsync_opt.runtimes.torch.serving.server import bind, make_app, metrics_text, serve
    from qsync_opt.runtimes.torch.serving.stage import StageModel, check_plan, group_names
    from qsync_opt.runtimes.torch.serving.steps import PAGE, Choice, Layout, PageStore, Step
    from qsync_opt.runtimes.torch.serving.tokens import TextStream, Tokenizer, load_tokenizer
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
    "GROUP", "PAGE", "SCHEMES", "Attention", "Choice", "DecoderConfig", "Engine", "EngineLimits", "FullError",
    "Generation", "GgufSource", "Layout", "LocalWorkers", "Mlp", "PackedWeight", "PageStore", "PagedCache",
    "Pipeline", "Request", "Rotary", "SafetensorsSource", "StageError", "StageModel", "StageOptions",
    "StageProcesses", "StateSource", "Step", "TextStream", "Tokenizer", "Update", "WeightSource", "Workers", "bind",
    "check_plan", "choose", "config_from_json", "generate_here", "group_names", "linear", "load_tokenizer",
    "make_app", "metrics_text", "microbatch_rows", "open_model", "pack", "read_ask", "read_config", "scheme_bits",
    "serve", "unpack",
]  # fmt: skip
