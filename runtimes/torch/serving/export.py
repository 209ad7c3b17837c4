"""A model in the schemes of a plan, as files of other engines: compressed-tensors for vLLM, GGUF for llama.cpp.

Weights are rounded to nearest one matrix at a time, as the target stores them: vLLM's scales are BF16, and llama.cpp's
4 and 8 bits have blocks of 32. What a target cannot load is refused by name before anything is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qsync_opt.errors import NotInstalledError, ProblemError, UnsupportedError, reason_of
from qsync_opt.runtimes.torch.serving.packing import GROUP, SCHEMES
from qsync_opt.runtimes.torch.serving.stage import Progress, check_plan
from qsync_opt.runtimes.torch.serving.weights import SafetensorsSource, open_model
from qsync_opt.serving import Plan

_KINDS = {
    "attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
_VLLM_BITS: Mapping[str, int] = {"W4": 4, "W4A16": 4, "W8": 8, "W8A16": 8, "W16": 16}
_GGUF_TYPES = {"W4": "Q4_0", "W4A16": "Q4_0", "W8": "Q8_0", "W8A16": "Q8_0", "W16": "BF16", "W32": "F32"}
_GGUF_STEMS = {
    "attn": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp": ("ffn_gate", "ffn_up", "ffn_down"),
}
_GGUF_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and how the target is started with the plan's stages."""

    path: Path
    environment: Mapping[str, str]
    arguments: Sequence[str]


def export_vllm(model: str | Path, plan: Plan, output: str | Path, *, progress: Progress | None = None) -> Exported:
    """Write a model folder that vLLM and transformers load: packed weights of compressed-tensors, a file per layer.

    Args:
        model: A model folder with safetensors.
        plan: A plan for it.
        output: The folder to make.
        progress: Told of every written layer.

    Raises:
        UnsupportedError: A scheme, a border between stages or a shape that vLLM does not load, or a GGUF file.
        ProblemError: The plan is for another model, or the folder exists.

    Source: the format "pack-quantized" of compressed-tensors: codes plus 2**(bits - 1), the first input in the lowest
    bits of an int32; scales (outputs, groups).
    """
    config, source = open_model(model)
    check_plan(plan, config)
    if not isinstance(source, SafetensorsSource):
        raise UnsupportedError("vLLM is given safetensors, not GGUF; export the model's safetensors folder")
    _check_schemes(plan, _VLLM_BITS, "vLLM")
    layers = _layers_of_stages(plan, "vLLM")
    bits_of = {name: _VLLM_BITS[plan.schemes[_group_of(name)]] for name in _linears(config.layers)}
    for name, bits in bits_of.items():
        shape = source.shape(f"{name}.weight")
        if bits < 16 and shape[1] % GROUP:
            raise UnsupportedError(
                f"{name} has {shape[1]} inputs, which groups of {GROUP} do not divide; vLLM needs that. Give its group "
                "the scheme W16"
            )
    with _new_folder(output) as folder:
        files = _write_shards(folder, source, bits_of, config.layers, progress)
        index: dict[str, Any] = {"metadata": {"total_size": sum(size for size, _ in files.values())}}
        index["weight_map"] = {name: file for file, (_, names) in files.items() for name in names}
        _write_json(folder / "model.safetensors.index.json", index)
        data = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        data.pop("torch_dtype", None)
        _write_json(folder / "config.json", data | {"dtype": "bfloat16", "quantization_config": _config_of(bits_of)})
        for path in Path(model).iterdir():
            if (
                path.is_file()
                and not path.name.endswith((".safetensors", ".index.json"))
                and path.name != "config.json"
            ):
                shutil.copy(path, folder / path.name)
    stages = len(layers)
    environment = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers))} if stages > 1 else {}
    return Exported(
        path=Path(output),
        environment=environment,
        arguments=("vllm", "serve", str(output), *(("--pipeline-parallel-size", str(stages)) if stages > 1 else ())),
    )


def export_llama_cpp(
    model: str | Path, plan: Plan, output: str | Path, *, progress: Progress | None = None
) -> Exported:
    """Write a GGUF file in a plan's schemes from another, with its metadata and tokenizer.

    Args:
        model: A ``.gguf`` file.
        plan: A plan for it; W4 becomes Q4_0, W8 Q8_0, W16 BF16 and W32 F32.
        output: The file to write.
        progress: Told of every written tensor.

    Raises:
        UnsupportedError: A scheme or shape that llama.cpp does not load, or the model is no GGUF file.
        ProblemError: The plan is for another model, or the file exists or cannot be written.
        NotInstalledError: The package ``gguf`` is missing.
    """
    if Path(model).suffix != ".gguf":
        raise UnsupportedError(
            f"{model} is no .gguf file, and only its metadata tell llama.cpp the tokenizer; make one by llama.cpp's "
            "convert_hf_to_gguf.py --outtype bf16, and export that"
        )
    config, _ = open_model(model)
    check_plan(plan, config)
    _check_schemes(plan, _GGUF_TYPES, "llama.cpp")
    layers = _layers_of_stages(plan, "llama.cpp")
    try:
        import gguf
    except ModuleNotFoundError as missing:
        raise NotInstalledError("GGUF needs the package 'gguf': pip install 'qsync-opt[serving]'") from missing
    reader = gguf.GGUFReader(model)
    types = {tensor.name: _gguf_type(gguf, tensor, plan) for tensor in reader.tensors}
    _rewrite_gguf(gguf, reader, types, Path(output), progress)
    split = ("--tensor-split", ",".join(map(str, layers))) if len(layers) > 1 else ()
    return Exported(path=Path(output), environment={}, arguments=("llama-server", "-m", str(output), *split))


def _linears(layers: int) -> list[str]:
    names = [name for kind in _KINDS.values() for name in kind]
    return [f"model.layers.{layer}.{name}" for layer in range(layers) for name in names]


def _group_of(name: str) -> str:
    layer, kind = name.split(".")[2:4]
    return f"{layer}.{'attn' if kind == 'self_attn' else 'mlp'}"


def _check_schemes(plan: Plan, allowed: Mapping[str, Any], target: str) -> None:
    for group, scheme in plan.schemes.items():
        if scheme not in allowed:
            known = "" if scheme in SCHEMES else ", which is no scheme of this runtime"
            raise UnsupportedError(
                f"group {group!r} has the scheme {scheme!r}{known}; {target} can be given {', '.join(allowed)}"
            )


def _layers_of_stages(plan: Plan, target: str) -> list[int]:
    for stage in plan.stages:
        if stage.groups[0].endswith(".mlp"):
            raise UnsupportedError(
                f"the stage on {stage.device!r} begins inside a layer, at {stage.groups[0]!r}, but {target} parts "
                "stages between layers only; move the border to the next layer"
            )
    return [len(stage.groups) // 2 for stage in plan.stages]


def _rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (outputs, inputs) in int32 and scales (outputs, groups) in BF16, which the codes are for."""
    highest = 2 ** (bits - 1) - 1
    grouped = weight.float().view(len(weight), -1, GROUP)
    scales = (grouped.abs().amax(2) / highest).to(torch.bfloat16)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (grouped / scales.float()[..., None]).round_().clamp_(-highest - 1, highest)
    return codes.flatten(1).to(torch.int32), scales


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in int32 words, the first input in the lowest bits."""
    shifted = (codes + 2 ** (bits - 1)).to(torch.int64).view(len(codes), -1, 32 // bits)
    words = (shifted << (torch.arange(32 // bits) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _write_shards(
    folder: Path, source: SafetensorsSource, bits_of: Mapping[str, int], layers: int, progress: Progress | None
) -> dict[str, tuple[int, list[str]]]:
    """A file for each layer and one for the rest; by file, its bytes and names."""
    from safetensors.torch import save_file

    shards: dict[str, list[str]] = {}
    for name in source.names():
        parts = name.split(".")
        shards.setdefault(parts[2] if name.startswith("model.layers.") else "ends", []).append(name)
    files = {}
    for done, (shard, names) in enumerate(shards.items(), 1):
        tensors = {}
        for name in names:
            linear, weight = name.removesuffix(".weight"), source.read(name)
            bits = bits_of.get(linear, 16) if name.endswith(".weight") else 16
            if bits == 16:
                tensors[name] = weight.to(torch.bfloat16).contiguous()
                continue
            codes, scales = _rounded(weight, bits)
            tensors[f"{linear}.weight_packed"] = _packed(codes, bits)
            tensors[f"{linear}.weight_scale"] = scales
            tensors[f"{linear}.weight_shape"] = torch.tensor(weight.shape)
        file = f"model-{shard}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        files[file] = sum(tensor.nbytes for tensor in tensors.values()), list(tensors)
        if progress is not None:
            progress(done, len(shards), shard)
    return files


def _config_of(bits_of: Mapping[str, int]) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors."""
    groups: dict[str, Any] = {}
    for bits in (4, 8):
        names = [name for name, own in bits_of.items() if own == bits]
        if names:
            weights = {
                "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                "dynamic": False, "observer": "minmax",
            }  # fmt: skip
            groups[f"group_{len(groups)}"] = {
                "targets": names, "weights": weights, "input_activations": None, "output_activations": None,
            }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *(name for name, bits in bits_of.items() if bits == 16)],
        "kv_cache_scheme": None,
    }


def _gguf_type(gguf: Any, tensor: Any, plan: Plan) -> Any:
    """The type that a tensor gets; its own if no group of the plan holds it."""
    parts = tensor.name.split(".")
    if parts[0] != "blk" or parts[-1] != "weight":
        return tensor.tensor_type
    kind = next((kind for kind, stems in _GGUF_STEMS.items() if parts[2] in stems), None)
    if kind is None:
        return tensor.tensor_type
    wanted = _GGUF_TYPES[plan.schemes[f"{parts[1]}.{kind}"]]
    if wanted.startswith("Q") and int(tensor.shape[0]) % _GGUF_BLOCK:
        raise UnsupportedError(
            f"{tensor.name} has {int(tensor.shape[0])} inputs, which blocks of {_GGUF_BLOCK} do not divide; llama.cpp "
            "needs that. Give its group the scheme W16"
        )
    return gguf.GGMLQuantizationType[wanted]


def _rewrite_gguf(gguf: Any, reader: Any, types: Mapping[str, Any], output: Path, progress: Progress | None) -> None:
    """Copy a file's metadata and write its tensors in their types, one at a time."""
    if output.exists():
        raise ProblemError(f"{output} exists already; remove it or give another name")

    def convert(tensor: Any) -> Any:
        if types[tensor.name] == tensor.tensor_type:
            return tensor.data
        return gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), types[tensor.name])

    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
        for field in reader.fields.values():
            if field.name == "general.architecture" or field.name.startswith("GGUF."):
                continue
            kind = field.types[0]
            part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=part)
        for tensor in reader.tensors:
            shape, wanted = [int(size) for size in reversed(tensor.shape)], types[tensor.name]
            block, size = gguf.GGML_QUANT_SIZES[wanted]
            stored = _numpy_type(gguf, wanted)
            if stored is np.uint8:  # its last dimension is then in bytes
                shape[-1] = shape[-1] // block * size
            writer.add_tensor_info(tensor.name, shape, stored, int(tensor.n_elements) // block * size, wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, tensor in enumerate(reader.tensors, 1):
            writer.write_tensor_data(convert(tensor))
            if progress is not None:
                progress(done, len(reader.tensors), tensor.name)
        writer.close()

    _renamed(output, write)


def _numpy_type(gguf: Any, kind: Any) -> Any:
    return {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}.get(kind, np.uint8)


def _renamed(output: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name beside it, and rename it when it is whole."""
    try:
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    except OSError as failure:
        raise ProblemError(f"{output} cannot be written: {reason_of(failure)}") from failure
    os.close(handle)
    try:
        write(Path(name))
        os.replace(name, output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _new_folder(output: str | Path) -> Iterator[Path]:
    """A folder that appears under its name when it is whole."""
    output = Path(output)
    if output.exists():
        raise ProblemError(f"{output} exists already; remove it or give another name")
    try:
        folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    except OSError as failure:
        raise ProblemError(f"{output} cannot be written: {reason_of(failure)}") from failure
    try:
        yield folder
        folder.chmod(0o755)
        os.replace(folder, output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
