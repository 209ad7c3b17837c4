"""Serving a plan with PyTorch: models loaded group by group into packed weights, stages as processes.

Llama, Mistral, Qwen 2 and 3, and Gemma 3 (text) run; tokens are those of transformers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.serving.config import DecoderConfig, Rotary, config_from_json, read_config
    from qsync_opt.runtimes.torch.serving.demo import ServingDemo, measure_plan, run_serving_demo
    from qsync_opt.runtimes.torch.serving.groups import Attention, Mlp, Rows, scheme_bits
    from qsync_opt.runtimes.torch.serving.packing import GROUP, PackedWeight, linear, pack, unpack
    from qsync_opt.runtimes.torch.serving.pipeline import Generation, Pipeline, StageError, generate_here
    from qsync_opt.runtimes.torch.serving.profiling import (
        MemoryWatch,
        process_kib,
        profile_serving,
        random_state,
        serve_model,
    )
    from qsync_opt.runtimes.torch.serving.sample import sample_config, write_sample
    from qsync_opt.runtimes.torch.serving.sensitivity import measure_harm, output_divergence
    from qsync_opt.runtimes.torch.serving.stage import Batch, StageModel, check_plan, group_names, microbatch_rows
    from qsync_opt.runtimes.torch.serving.weights import (
        GgufSource,
        SafetensorsSource,
        StateSource,
        WeightSource,
        open_model,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "GROUP", "Attention", "Batch", "DecoderConfig", "Generation", "GgufSource", "MemoryWatch", "Mlp",
    "PackedWeight", "Pipeline", "Rotary", "Rows", "SafetensorsSource", "ServingDemo", "StageError", "StageModel",
    "StateSource", "WeightSource", "check_plan", "config_from_json", "generate_here", "group_names", "linear",
    "measure_harm", "measure_plan", "microbatch_rows", "open_model", "output_divergence", "pack", "process_kib",
    "profile_serving", "random_state", "read_config", "run_serving_demo", "sample_config", "scheme_bits",
    "serve_model", "unpack", "write_sample",
]  # fmt: skip
