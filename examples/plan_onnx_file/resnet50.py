"""Write a ResNet-50 as an ONNX file with made-up weights: a model file to plan, without a download or torch."""

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4
CLASSES = 1000


class Builder:
    """Collects nodes and weights; every method returns the name of its result."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)

    def add(self, kind: str, name: str, inputs: list[str], **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}.out"], name=name, **attributes))
        return f"{name}.out"

    def weight(self, name: str, shape: tuple[int, ...], scale: float) -> str:
        values = self._random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def constant(self, name: str, size: int, value: float) -> str:
        self.weights.append(numpy_helper.from_array(np.full(size, value, np.float32), name))
        return name

    def convolution(self, name: str, x: str, channels: tuple[int, int], kernel: int, stride: int = 1) -> str:
        before, after = channels
        shape = (after, before, kernel, kernel)
        weight = self.weight(f"{name}.weight", shape, (2 / (before * kernel * kernel)) ** 0.5)
        pad = kernel // 2
        x = self.add("Conv", name, [x, weight], strides=[stride] * 2, pads=[pad] * 4, kernel_shape=[kernel] * 2)
        norm = name.replace("conv", "norm")
        state = [self.constant(f"{norm}.{part}", after, float(part in ("scale", "var"))) for part in _NORM]
        return self.add("BatchNormalization", norm, [x, *state])

    def bottleneck(self, name: str, x: str, channels: tuple[int, int], stride: int) -> str:
        before, width = channels
        after = width * EXPANSION
        y = self.add("Relu", f"{name}.relu1", [self.convolution(f"{name}.conv1", x, (before, width), 1)])
        y = self.add("Relu", f"{name}.relu2", [self.convolution(f"{name}.conv2", y, (width, width), 3, stride)])
        y = self.convolution(f"{name}.conv3", y, (width, after), 1)
        if before != after:
            x = self.convolution(f"{name}.shortcut.conv", x, (before, after), 1, stride)
        return self.add("Relu", f"{name}.relu3", [self.add("Add", f"{name}.add", [y, x])])


_NORM = ("scale", "shift", "mean", "var")


def resnet50(batch: int, seed: int = 0) -> onnx.ModelProto:
    """ResNet-50 for images of 224 x 224 pixels (He et al., 2016)."""
    net = Builder(seed)
    x = net.add("Relu", "stem.relu", [net.convolution("stem.conv", "image", (3, 64), 7, 2)])
    x = net.add("MaxPool", "stem.pool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    before = 64
    for number, (width, blocks) in enumerate(STAGES, start=1):
        for block in range(blocks):
            stride = 2 if block == 0 and number > 1 else 1
            x = net.bottleneck(f"stage{number}.{block}", x, (before, width), stride)
            before = width * EXPANSION
    x = net.add("Flatten", "flatten", [net.add("GlobalAveragePool", "pool", [x])])
    head = [net.weight("head.weight", (CLASSES, before), before**-0.5), net.constant("head.bias", CLASSES, 0.0)]
    net.add("Gemm", "head", [x, *head], transB=1)
    graph = helper.make_graph(
        net.nodes,
        "resnet50",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, (batch, 3, 224, 224))],
        [helper.make_tensor_value_info("head.out", TensorProto.FLOAT, (batch, CLASSES))],
        net.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    onnx.save(resnet50(options.batch), options.output)
    print(f"wrote {options.output}")
