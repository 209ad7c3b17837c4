"""Sessions of ONNX Runtime on a named device: starting them, running them, and tensors of every format."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import EncodeError
from onnx import helper

import qsync_opt
from qsync_opt.costs import DeviceIdentity
from qsync_opt.errors import ModelError, UnsupportedError, first_line
from qsync_opt.io import check_integer
from qsync_opt.runtimes.host import processor_name
from qsync_opt.runtimes.onnxruntime.number_types import bfloat16_bits
from qsync_opt.runtimes.onnxruntime.prepared import LARGEST_BYTES, Array, PreparedModel

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_QUIET, _ERRORS = 4, 3
_OPSET = 21
Feeds = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device of sessions: ``kind`` is cpu or cuda, ``threads`` those of one operator on the processor."""

    kind: str
    index: int
    threads: int

    def identity(self, name: str | None) -> DeviceIdentity:
        """Device and versions that times depend on; ``name`` replaces that of the hardware."""
        versions = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
            "python": platform.python_version(),
            "qsync_opt": qsync_opt.__version__,
        }
        hardware = processor_name() if self.kind == "cpu" else f"CUDA device {self.index}"
        return DeviceIdentity(name=name or hardware, kind=self.kind, threads=self.threads, versions=versions)


def find_device(name: str, threads: int | None = None) -> Device:
    """Return the device ``cpu``, ``cuda`` or ``cuda:1``; without ``threads``, one per core that this process may use.

    Raises:
        UnsupportedError: No such device, or the installed ONNX Runtime has no provider for it.
    """
    kind, _, index = str(name).partition(":")
    if kind not in _PROVIDERS or (index and (kind == "cpu" or not index.isascii() or not index.isdigit())):
        raise UnsupportedError(f"device {name!r} is unknown: allowed are cpu, cuda, and cuda:1 for the second card")
    provided = ort.get_available_providers()
    if _PROVIDERS[kind] not in provided:
        raise UnsupportedError(
            f"device {name!r} needs {_PROVIDERS[kind]}, but the installed ONNX Runtime {ort.__version__} has "
            f"{', '.join(provided)}; install onnxruntime-gpu in place of onnxruntime"
        )
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    check_integer(threads, "threads", minimum=1, error=UnsupportedError)
    return Device(kind=kind, index=int(index or 0), threads=threads)


def start_session(proto: onnx.ModelProto, device: Device, what: str, *, own_device_only: bool = False) -> Any:
    """Start a session; ``what`` names the model in errors.

    ``own_device_only`` refuses a model of which a part would run on the processor instead of the card.

    Raises:
        ModelError: The model is too large to be handed over.
        UnsupportedError: ONNX Runtime cannot run it there; the text has its reason.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = device.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET if own_device_only else _ERRORS
    provider: Any = _PROVIDERS[device.kind]
    providers = [provider]
    if device.kind != "cpu":
        # Without TF32, which ONNX Runtime computes products of FP32 in by itself.
        providers = [(provider, {"device_id": device.index, "use_tf32": 0})]
        if own_device_only:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        else:  # which contradicts the entry, and is then an error
            providers.append(_PROVIDERS["cpu"])
    try:
        data = proto.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{what} is too large for ONNX Runtime to take as one: {error}") from error
    try:
        return ort.InferenceSession(data, options, providers=providers)
    except Exception as error:  # the library's errors have no base of their own
        raise UnsupportedError(f"{what} cannot run on {device.kind}: {reason_of(error)}") from error


def small_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """A model of a few nodes."""
    graph = helper.make_graph(nodes, "sample", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)


def reason_of(error: BaseException) -> str:
    """The message of ONNX Runtime in one line, without its error codes."""
    line = first_line(error)
    parts = line.split(" : ", 3)
    return parts[3] if line.startswith("[ONNXRuntimeError]") and len(parts) == 4 else line


def sample_feeds(proto: onnx.ModelProto) -> dict[str, Array]:
    """Sample inputs of a model, the same in every call: normal numbers, index 0, True.

    Raises:
        ModelError: They would take more memory than a whole model may.
    """
    generator = np.random.default_rng(0)
    left = LARGEST_BYTES
    weights = {tensor.name for tensor in proto.graph.initializer}
    feeds: dict[str, Array] = {}
    for info in proto.graph.input:
        if info.name in weights:
            continue
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        left -= math.prod(shape) * dtype.itemsize
        if left < 0:
            raise ModelError(
                f"input {info.name!r} of the model {proto.graph.name!r} has shape {tuple(shape)}: inputs of more than "
                f"{LARGEST_BYTES} bytes are not run here; export the model for a smaller batch"
            )
        if dtype == np.float32:
            feeds[info.name] = generator.standard_normal(shape, dtype=np.float32)
        else:
            feeds[info.name] = np.ones(shape, dtype) if dtype == np.bool_ else np.zeros(shape, dtype)
    return feeds


def record_values(model: PreparedModel, feeds: Feeds, device: Device) -> dict[str, Array]:
    """Every tensor that a node reads or writes in one FP32 run, inputs included.

    Raises:
        ModelError: It does not run on these inputs.
    """
    values = dict(feeds)
    wanted = [value for node in model.proto.graph.node for value in node.output if value in model.types]
    values.update(zip(wanted, run_exposed(model.proto, wanted, model.types, feeds, device), strict=True))
    return values


def run_exposed(
    proto: onnx.ModelProto, values: Sequence[str], types: Mapping[str, int], feeds: Feeds, device: Device
) -> list[Array]:
    """Some values of a model from one run, whether they are among its results or not."""
    scratch = onnx.ModelProto()
    scratch.CopyFrom(proto)
    scratch.graph.ClearField("output")
    for value in dict.fromkeys(values):
        scratch.graph.output.append(helper.make_tensor_value_info(value, types[value], None))
    session = start_session(scratch, device, f"the model {proto.graph.name!r} with all its values returned")
    try:
        arrays: list[Any] = session.run(list(values), dict(feeds))
    except Exception as error:  # the library's errors have no base of their own
        raise ModelError(f"the model {proto.graph.name!r} does not run: {reason_of(error)}") from error
    return [np.asarray(value) for value in arrays]


def tensor_on(values: Array, number_format: str, device: Device) -> Any:
    """FP32, integer or boolean values as a tensor on the device; FP32 ones in the 16-bit format named, if any."""
    if number_format == "BF16":
        bits = bfloat16_bits(values)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    array = values.astype(np.float16) if number_format == "FP16" else values
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), device.kind, device.index)
