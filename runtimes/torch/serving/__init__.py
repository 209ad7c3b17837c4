"""Serving a plan with PyTorch: packed weights, paged caches, stages as processes, continuous batching, an endpoint.

Llama, Mistral, Qwen 2 and 3, and Gemma 3 (text) run; tokens are those of transformers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.serving.cache import PagedCache
    from qsync_opt.runtimes.torch.serving.card_costs import PassDifferences
    from qsync_opt.runtimes.torch.serving.choosing import choose
    from qsync_opt.runtimes.torch.serving.clients import LoadResult, load_test, percentiles
    from qsync_opt.runtimes.torch.serving.config import DecoderConfig, Rotary, config_from_json, read_config
    from qsync_opt.runtimes.torch.serving.demo import ServingDemo, measure_plan, run_serving_demo
    from qsync_opt.runtimes.torch.serving.differences import Difference, first_differences
    from qsync_opt.runtimes.torch.serving.engine import Engine, EngineLimits, FullError, Request, Update
    from qsync_opt.runtimes.torch.serving.export import Exported, export_llama_cpp, export_vllm
    from qsync_opt.runtimes.torch.serving.groups import Attention, Mlp
    from qsync_opt.runtimes.torch.serving.identity import fingerprint
    from qsync_opt.runtimes.torch.serving.launching import describe, start_engine, start_stages, uniform_plan
    from qsync_opt.runtimes.torch.serving.measuring import MemoryWatch, measure_batches
    from qsync_opt.runtimes.torch.serving.packing import (
        GROUP,
        SCHEMES,
        PackedWeight,
        linear,
        pack,
        scheme_bits,
        unpack,
    )
    from qsync_opt.runtimes.torch.serving.pipeline import (
        Generation,
        Pipeline,
        generate,
        generate_here,
        microbatch_rows,
    )
    from qsync_opt.runtimes.torch.serving.profiling import (
        profile_serving,
        random_state,
        serve_model,
    )
    from qsync_opt.runtimes.torch.serving.protocol import read_ask
    from qsync_opt.runtimes.torch.serving.sample import sample_config, write_sample
    from qsync_opt.runtimes.torch.serving.sensitivity import measure_harm, output_divergence
    from qsync_opt.runtimes.torch.serving.server import bind, make_app, metrics_text, serve, serve_quietly
    from qsync_opt.runtimes.torch.serving.speculating import (
        StartedSpeculation,
        check_speculation,
        measure_model,
        start_speculation,
    )
    from qsync_opt.runtimes.torch.serving.speculation import (
        PLAIN,
        AdaptiveSpeculation,
        Cycle,
        FixedSpeculation,
        Speculation,
        parse_speculation,
    )
    from qsync_opt.runtimes.torch.serving.speculation_measuring import (
        answer,
        measure_acceptance,
        measure_speculation,
        measure_times,
        random_prompts,
    )
    from qsync_opt.runtimes.torch.serving.stage import StageModel, check_plan, group_names
    from qsync_opt.runtimes.torch.serving.steps import (
        PAGE,
        SELF_DRAFTS,
        Choice,
        Layout,
        PageStore,
        Precision,
        SelfDraft,
        Step,
        pages_of,
    )
    from qsync_opt.runtimes.torch.serving.tokens import TextStream, Tokenizer, load_tokenizer
    from qsync_opt.runtimes.torch.serving.weights import (
        GgufSource,
        SafetensorsSource,
        StateSource,
        WeightSource,
        open_model,
        row_parts,
    )
    from qsync_opt.runtimes.torch.serving.workers import (
        LocalWorkers,
        Result,
        StageError,
        StageOptions,
        StageProcesses,
        Workers,
        run_step,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "GROUP", "PAGE", "PLAIN", "SCHEMES", "SELF_DRAFTS", "AdaptiveSpeculation", "Attention", "Choice", "Cycle",
    "DecoderConfig", "Difference", "Engine", "EngineLimits", "Exported", "FixedSpeculation", "FullError", "Generation",
    "GgufSource", "Layout", "LoadResult", "LocalWorkers", "MemoryWatch", "Mlp", "PackedWeight", "PageStore",
    "PagedCache", "PassDifferences", "Pipeline", "Precision", "Request", "Result", "Rotary", "SafetensorsSource",
    "SelfDraft", "ServingDemo", "Speculation", "StageError", "StageModel", "StageOptions", "StageProcesses",
    "StartedSpeculation", "StateSource", "Step", "TextStream", "Tokenizer", "Update", "WeightSource", "Workers",
    "answer", "bind", "check_plan", "check_speculation", "choose", "config_from_json", "describe", "export_llama_cpp",
    "export_vllm", "fingerprint", "first_differences", "generate", "generate_here", "group_names", "linear",
    "load_test", "load_tokenizer", "make_app", "measure_acceptance", "measure_batches", "measure_harm", "measure_model",
    "measure_plan", "measure_speculation", "measure_times", "metrics_text", "microbatch_rows", "open_model",
    "output_divergence", "pack", "pages_of", "parse_speculation", "percentiles", "profile_serving", "random_prompts",
    "random_state", "read_ask", "read_config", "row_parts", "run_serving_demo", "run_step", "sample_config",
    "scheme_bits", "serve", "serve_model", "serve_quietly", "start_engine", "start_speculation", "start_stages",
    "uniform_plan", "unpack", "write_sample",
]  # fmt: skip
