# ruff: noqa: E501
"""Spoil valid files: in their structure (values, keys, nesting, repetition) and in their bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import onnx
import yaml
from google.protobuf.descriptor import FieldDescriptor

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 10**4400, 0.0, -0.0, 0.5,
    -1.5, 1e-320, 1e308, -1e308, 1e400, float("nan"), float("inf"), -float("inf"), "", " ", "x", "x-", "\ud800",
    "\udfff\ud800", "\x00", "a\nb", "é" * 40, "9" * 5000, "x" * 20000, "FP32", "INT8", "FP32>INT8", ">", "adjustable",
    "16 GiB", "1e400 GiB", "-1 us", "../../etc/passwd", "/dev/zero", [], {}, [[]], [None], {"": 0}, {"x-a": 1},
    [0] * 300, {"a": {"a": {"a": {}}}},
]  # fmt: skip
_TEXTS = [
    b"&a [*a]", b"!!python/object/apply:os.system ['true']", b"!!binary aGk=", b"{[1]: 2}", b"? [a]\n: b", b"<<: {a: 1}",
    b"2001-13-45", b"0x" + b"f" * 5000, b"1:" * 50 + b"1", b".nan", b"NaN", b"Infinity", b"\xff\xfe", b"\x00", b"\xed\xa0\x80",
    b'"\\ud800"', b"[" * 300, b"{" * 300, b'{"a":' * 300, b"1" * 5000, b"- " * 300, b"%YAML 9.9\n---\n", b"---\n", b"\t",
]  # fmt: skip


def mutated(kind: str, seed: Any, source: random.Random) -> bytes:
    """Return a spoiled file of a kind (json, yaml, onnx), made from a valid one."""
    if source.random() < 0.02:
        return source.randbytes(source.randrange(400))
    if kind == "onnx":
        data = _proto(seed, source) if source.random() < 0.75 else seed
        return _bytes(data, source) if source.random() < 0.4 else data
    data = seed
    if not isinstance(seed, str):
        data = copy.deepcopy(seed)
        for _ in range(source.choice((1, 1, 1, 2, 4))):
            data = _data(data, source)
    text = _written(kind, data, source)
    return _bytes(text, source) if source.random() < 0.3 or isinstance(seed, str) else text


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    children = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, child in children:
        found.append((node, key))
        _places(child, found)
    return found


def _data(data: Any, source: random.Random) -> Any:
    """Change one place of parsed data."""
    places = _places(data, [])
    if not places or source.random() < 0.01:
        return copy.deepcopy(source.choice(HOSTILE))
    parent, key = source.choice(places)
    match source.randrange(8):
        case 0 | 1 | 2:
            parent[key] = copy.deepcopy(source.choice(HOSTILE))
        case 3:
            del parent[key]
        case 4:  # something from elsewhere in the file
            other, place = source.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                parent[key] = copy.deepcopy(other[place])
        case 5 if isinstance(parent, dict):  # another key
            new = source.choice([*HOSTILE[24:34], f"{key}s", str(key).upper(), f"x-{key}"])
            parent[str(new)] = parent.pop(key)
        case 5 | 6 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        case 6 if isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
            parent[key] = source.choice([-parent[key], parent[key] * 2**40, parent[key] + 1, _digits(parent[key])])
        case _:
            depth = source.choice((1, 3, 30))
            for _ in range(depth):
                parent[key] = [parent[key]] if source.random() < 0.5 else {"a": parent[key]}
    return data


def _digits(number: float) -> str:
    """The number as a text; Python itself writes no integers of more than 4300 digits."""
    return "9" * 5000 if isinstance(number, int) and abs(number) >= 10**4299 else str(number)


def _written(kind: str, data: Any, source: random.Random) -> bytes:
    if isinstance(data, str) and kind == "yaml":
        return data.encode("utf-8", "surrogatepass")
    if kind == "yaml" and source.random() < 0.5:
        try:
            text = yaml.safe_dump(data, allow_unicode=source.random() < 0.5)
            return text.encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, ValueError):
            pass
    sys_limit = _without_limit(data)
    text = json.dumps(sys_limit, ensure_ascii=source.random() < 0.7)
    if source.random() < 0.1:  # a key twice
        text = text.replace('"name":', '"name": "twice", "name":', 1)
    text = text.replace(f'"{_HUGE}"', "1" + "0" * 4400)
    return text.encode("utf-8", "surrogatepass")


_HUGE = "huge number"


def _without_limit(data: Any) -> Any:
    """Python writes no integers of more than 4300 digits; they are put in afterwards."""
    if isinstance(data, dict):
        return {str(key): _without_limit(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_limit(value) for value in data]
    return _HUGE if isinstance(data, int) and abs(data) >= 10**4299 else data


def _bytes(data: bytes, source: random.Random) -> bytes:
    """Cut, flip, repeat or insert bytes."""
    for _ in range(source.choice((1, 1, 2, 5))):
        at = source.randrange(len(data) + 1)
        match source.randrange(5):
            case 0:
                data = data[:at]
            case 1 if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << source.randrange(8))]) + data[at + 1 :]
            case 2:
                data = data[:at] + source.choice(_TEXTS) + data[at:]
            case 3:
                end = min(len(data), at + source.randrange(1, 60))
                data = data[:end] + data[at:end] * source.choice((1, 2, 20)) + data[end:]
            case _:
                end = min(len(data), at + source.randrange(1, 20))
                data = data[:at] + source.randbytes(end - at) + data[end:]
    return data


_NUMBERS = [0, 1, 2, 3, -1, -2, 7, 16, 255, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)]
_NAMES = [
    b"", b"x", b"w", b"y", b"a", b"MatMul", b"Loop", b"If", b"Scan", b"Constant", b"Concat", b"Expand", b"Range", b"Einsum",
    b"ConstantOfShape", b"Tile", b"LSTM", b"Attention", b"ij,jk->ik", b"...ij->ij", b"i" * 500, b"->", b",,,", b"com.microsoft",
    b"../../etc/passwd", b"/dev/zero", b"/etc/hostname", b"location", b"offset", b"-1", b"99999999999999999999", b"\xff\xfe",
    b"\x00", b"qsync_opt.model.graph", b"qsync_opt.operator", b"call_function[target=torch.ops.aten.linear.default](args = ())",
    b"pkg.torch.onnx.fx_node", b"pkg.torch.onnx.name_scopes", b"['', 'a', 'b']", b"[" * 200, b"1e999", b"{}",
]  # fmt: skip


def _messages(message: Any, found: list[Any]) -> list[Any]:
    found.append(message)
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for child in value if _repeated(message, field) else [value]:
                _messages(child, found)
    return found


def _repeated(message: Any, field: Any) -> bool:
    return hasattr(getattr(message, field.name), "append") or hasattr(getattr(message, field.name), "add")


def _value(field: Any, source: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.choice(_NAMES).decode("utf-8", "replace")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return source.choice(_NAMES)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return source.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])
    if field.type == FieldDescriptor.TYPE_ENUM:
        return source.choice([value.number for value in field.enum_type.values])
    return source.choice(_NUMBERS)


def _proto(seed: bytes, source: random.Random) -> bytes:
    """Change some fields of a model, whatever they are."""
    model = onnx.ModelProto.FromString(seed)
    for _ in range(source.choice((1, 1, 2, 3))):
        messages = _messages(model, [])
        message = source.choice(messages)
        field = source.choice(message.DESCRIPTOR.fields)
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        try:
            if source.random() < 0.2:
                message.ClearField(field.name)
            elif _repeated(message, field):
                values = getattr(message, field.name)
                if len(values) and source.random() < 0.3:
                    del values[source.randrange(len(values))]
                elif is_message:
                    fitting = [m for m in messages if m.DESCRIPTOR is field.message_type]
                    # By way of bytes: a message may be put into itself.
                    values.add().ParseFromString(source.choice(fitting).SerializeToString() if fitting else b"")
                else:
                    value = _value(field, source)
                    if len(values) and source.random() < 0.7:
                        values[source.randrange(len(values))] = value
                    else:
                        values.append(value)
            elif is_message:
                fitting = [m for m in messages if m.DESCRIPTOR is field.message_type]
                if fitting:
                    copied = source.choice(fitting).SerializeToString()
                    getattr(message, field.name).ParseFromString(copied)
            else:
                setattr(message, field.name, _value(field, source))
        except (ValueError, TypeError):  # a number beyond the field's range
            continue
    return model.SerializeToString()
