"""State of a training job: tensors under the names of the plain model, everything else as JSON."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from qsync_opt.errors import ModelError, ProblemError, QSyncError, first_line
from qsync_opt.io import LARGEST_INTEGER
from qsync_opt.runtimes.torch.support import plain_name

_TENSOR, _TUPLE, _ITEMS, _COUNTER, _FLOAT = "$tensor", "$tuple", "$items", "$counter", "$float"
_MARKS = frozenset({_TENSOR, _TUPLE, _ITEMS, _COUNTER, _FLOAT})
DEEPEST = 50
"""Most levels of nested lists and dictionaries; no optimizer has deeper state."""
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def split_state(value: Any, place: str, tensors: dict[str, Tensor], levels: int = DEEPEST) -> Any:
    """The JSON form of nested state; its tensors are added to ``tensors`` under names that begin with ``place``.

    Args:
        value: Dictionaries, lists and tuples of tensors, numbers, texts, truth values and None.
        place: Path to the value, with dots.
        tensors: Receives the tensors, which are not copied.
        levels: How many levels are left.

    Raises:
        ModelError: Something that has no form in JSON; the text says where.
    """
    if not levels:
        raise ModelError(f"the state at {place[:200]!r} is nested in more than {DEEPEST} levels; leave it out")
    if isinstance(value, Tensor):
        tensors[place] = value.detach()
        return {_TENSOR: place}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) > LARGEST_INTEGER:
            raise ModelError(f"the state at {place!r} is {value}: a checkpoint holds integers of 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        parts = [split_state(part, f"{place}.{i}", tensors, levels - 1) for i, part in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise ModelError(f"the state at {place!r} has the key {key!r}: texts and integers can be kept")
        entries = {key: split_state(part, f"{place}.{key}", tensors, levels - 1) for key, part in value.items()}
        if isinstance(value, Counter):  # milestones of MultiStepLR, which needs the methods of a Counter
            return {_COUNTER: [[key, part] for key, part in entries.items()]}
        plain = all(isinstance(key, str) for key in entries) and not _MARKS & entries.keys()
        return entries if plain else {_ITEMS: [[key, part] for key, part in entries.items()]}
    raise ModelError(
        f"the state at {place!r} is a {type(value).__name__}, which a checkpoint cannot hold: tensors, numbers, texts, "
        "lists, tuples and dictionaries can be; leave it out of state_dict()"
    )


def join_state(data: Any, tensors: Mapping[str, Tensor], where: str = "checkpoint", levels: int = DEEPEST + 4) -> Any:
    """The inverse of `split_state`.

    Raises:
        ProblemError: ``data`` is not what `split_state` makes, or names a tensor that is not there.
    """

    def fail() -> NoReturn:
        raise ProblemError(f"{where}: state that is not as this package writes it; give a checkpoint that it wrote")

    def inner(part: Any) -> Any:
        return join_state(part, tensors, where, levels - 1)

    if not levels or (isinstance(data, float) and not math.isfinite(data)):  # a number like 1e999
        fail()
    if isinstance(data, list):
        return [inner(part) for part in data]
    if not isinstance(data, dict):
        return data
    marks = _MARKS & data.keys()
    if not marks:
        return {key: inner(part) for key, part in data.items()}
    if len(data) != 1:
        fail()
    mark, content = next(iter(data.items()))
    if mark == _TENSOR:
        if not isinstance(content, str) or content not in tensors:
            raise ProblemError(f"{where}: the tensor {content!r} is missing; give a whole checkpoint")
        return tensors[content]
    if mark == _FLOAT:
        return _FLOATS[content] if isinstance(content, str) and content in _FLOATS else fail()
    if not isinstance(content, list):
        fail()
    if mark == _TUPLE:
        return tuple(inner(part) for part in content)
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str | int):
            fail()
    entries = {key: inner(part) for key, part in content}
    return Counter(entries) if mark == _COUNTER else entries


def tensors_named(data: Any, levels: int = 3 * DEEPEST + 4) -> list[str]:
    """Names of the tensors that `join_state` will ask for.

    Raises:
        ProblemError: It is nested deeper than `split_state` makes it.
    """
    if not levels:
        raise ProblemError(
            f"the state of a checkpoint is nested in more than {DEEPEST} levels: it is not of this package"
        )
    if isinstance(data, list):
        return [name for part in data for name in tensors_named(part, levels - 1)]
    if not isinstance(data, dict):
        return []
    if set(data) == {_TENSOR}:
        return [str(data[_TENSOR])]
    return [name for part in data.values() for name in tensors_named(part, levels - 1)]


MODEL, OPTIMIZER, OTHER, RANDOM = "model", "optimizer", "other", "random"
"""First parts of the names of tensors."""
_SHOWN = 3


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], Any]:
    """Tensors of the model's ``state_dict`` by ``model.<name>``, and the rest of it (extra state) as JSON.

    Raises:
        ModelError: A lazy module has no parameters yet.
    """
    tensors: dict[str, Tensor] = {}
    rest = {}
    for name, value in model.state_dict().items():
        if nn.parameter.is_lazy(value):
            raise ModelError(
                f"the parameter {plain_name(name)!r} has no shape yet: run one batch through the model, whose lazy "
                "modules make their parameters then, before checkpoints are saved or loaded"
            )
        if isinstance(value, Tensor):
            tensors[f"{MODEL}.{plain_name(name)}"] = value
        else:
            rest[name] = split_state(value, f"{MODEL}.{plain_name(name)}", tensors)
    return tensors, rest


def buffer_names(model: nn.Module) -> set[str]:
    """Names of the model's buffers in a checkpoint."""
    return {f"{MODEL}.{plain_name(name)}" for name, _ in model.named_buffers(remove_duplicate=False)}


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors stores them: contiguous, and tied weights as copies.

    Raises:
        ModelError: safetensors cannot store one of them.
    """
    seen: set[tuple[torch.device, int]] = set()
    result = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if (kind := _unsupported(local)) is not None:
            raise ModelError(
                f"{name!r} is {kind}, which a checkpoint cannot hold: make it a dense one of another type, or leave it "
                "out of state_dict() (a buffer with persistent=False)"
            )
        place = (local.device, local.untyped_storage().data_ptr())
        if not local.is_contiguous():  # for example in the format channels_last
            tensor = tensor.contiguous()
        elif place in seen and local.numel():
            tensor = tensor.clone()
        seen.add(place)
        result[name] = tensor
    return result


def _unsupported(tensor: Tensor) -> str | None:
    """Why safetensors cannot store a tensor, None if it can."""
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.is_quantized or tensor.dtype in (torch.complex32, torch.complex128):
        return f"of type {tensor.dtype}"
    return None


def optimizer_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Any]:
    """Tensors and JSON values of optimizers, by the names of the parameters instead of their numbers.

    Their parameters that are not the model's (such as those of a loss) are included.
    """
    tensors: dict[str, Tensor] = {}
    saved = []
    for number, optimizer in enumerate(optimizers):
        names = _names(model, optimizer)
        state = optimizer.state_dict()
        place = f"{OPTIMIZER}.{number}"
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
        rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        saved.append(
            {
                "state": {
                    names[index]: split_state(values, f"{place}.{names[index]}", tensors)
                    for index, values in state["state"].items()
                },
                "param_groups": split_state(groups, f"{place}.groups", tensors),
                "rest": split_state(rest, f"{place}.rest", tensors),
                "outside": split_state(_outside(model, optimizer), f"{place}.outside", tensors),
            }
        )
    return tensors, saved


def require_same_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Any, where: str
) -> None:
    """Refuse optimizers that are not those of the checkpoint.

    Raises:
        ModelError: Their number or their parameters are others.
        ProblemError: ``saved`` is not what `optimizer_state` makes.
    """
    if len(saved) != len(optimizers):
        raise ModelError(f"{where} has {len(saved)} optimizers and this job {len(optimizers)}: give as many")
    for number, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=True)):
        if not (
            isinstance(entry, dict) and isinstance(entry.get("state"), dict) and _is_groups(entry.get("param_groups"))
        ):
            raise ProblemError(f"{where}: optimizer {number} is not as this package writes it; give a whole checkpoint")
        groups = _grouped(model, optimizer)
        known = {name for group in groups for name in group}
        before = [group["params"] for group in entry["param_groups"]]
        count = sum(map(len, before))
        unknown = [name for name in (*chain.from_iterable(before), *entry["state"]) if name not in known]
        what = None
        if unknown or count != len(known):
            what = f"it has {unknown[0]!r}" if unknown else f"it has {count} parameters and not {len(known)}"
        elif sorted(map(sorted, before)) != sorted(map(sorted, groups)):
            what = f"its {len(before)} groups hold others than the {len(groups)} here"
        if what is not None:
            raise ModelError(
                f"optimizer {number} of {where} is for other parameters: {what}; build the optimizer as before"
            )


def load_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Any, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Load the states of optimizers, after `require_same_optimizers`.

    Raises:
        ProblemError: ``saved`` is not what `optimizer_state` makes.
        ModelError: An optimizer refuses it.
    """
    for number, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=True)):
        numbers = {name: index for index, name in _names(model, optimizer).items()}
        state, groups = (join_state(entry[key], tensors, where) for key in ("state", "param_groups"))
        rest = join_state(entry.get("rest", {}), tensors, where)
        # torch assigns by position: states would go to other parameters if these were in another order before.
        by_names = {tuple(sorted(group["params"])): group for group in groups}
        present = []
        for own, names in zip(optimizer.param_groups, _grouped(model, optimizer), strict=True):
            group = {**by_names[tuple(sorted(names))], "params": [numbers[name] for name in names]}
            present.append(group | ({"param_names": own["param_names"]} if "param_names" in own else {}))
        with loading_state(f"optimizer {number}", where):
            optimizer.load_state_dict(
                {
                    **rest,
                    "state": {numbers[name]: values for name, values in state.items()},
                    "param_groups": present,
                }
            )
        outside = join_state(entry.get("outside", {}), tensors, where)
        with torch.no_grad():
            for name, parameter in _outside(model, optimizer).items():
                if name in outside:
                    parameter.copy_(outside[name])


@contextlib.contextmanager
def loading_state(what: str, where: str) -> Iterator[None]:
    """Name the part of a job that fails to load its state, whatever it raises.

    Raises:
        ModelError: In place of that.
    """
    try:
        yield
    except QSyncError:
        raise
    except Exception as failure:
        raise ModelError(
            f"{what} does not take its state from {where} ({type(failure).__name__}: {first_line(failure)}): build it "
            "as before, then load again, as other parts of the job have theirs already"
        ) from failure


def _is_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(isinstance(g, dict) and _is_texts(g.get("params")) for g in groups)


def _is_texts(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _grouped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of an optimizer's parameters by group."""
    names = iter(_names(model, optimizer).values())
    return [[next(names) for _ in group["params"]] for group in optimizer.param_groups]


def _outside(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters of an optimizer that are not the model's, by their name in `_names`."""
    own = {id(parameter) for parameter in model.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = _names(model, optimizer)
    return {names[i]: parameter for i, parameter in enumerate(parameters) if id(parameter) not in own}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Name of each parameter of an optimizer by its number in the ``state_dict``."""
    by_identity = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    names: dict[int, str] = {}
    for position, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            names[len(names)] = by_identity.get(id(parameter), f"parameter {place} of group {position}")
    return names


def saved_sizes(path: Path, most_bytes: int) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of the tensors that a checkpoint holds, by name.

    Args:
        path: The checkpoint's folder.
        most_bytes: Size of all its files, which no tensor can exceed.

    Raises:
        ProblemError: Its files are not as this package writes them.
    """
    where = f"the checkpoint {str(path)!r}"
    try:
        known = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        sizes = {n: (e.size, e.properties.dtype) for n, e in known.items() if isinstance(e, TensorStorageMetadata)}
        wrong = [n for n, (s, d) in sizes.items() if min(s, default=0) < 0 or s.numel() * d.itemsize > most_bytes]
    except Exception as failure:  # malformed files raise all kinds of errors in safetensors and torch
        raise ProblemError(
            f"{where} has tensors that cannot be read ({type(failure).__name__}: {first_line(failure)[:200]}); "
            "nothing was loaded: give a checkpoint that this package wrote"
        ) from failure
    if wrong:
        raise ProblemError(
            f"{where} says that {wrong[0]!r} has the shape {tuple(sizes[wrong[0]][0])}, which its files do not hold; "
            "nothing was loaded: give a checkpoint that this package wrote"
        )
    return sizes


def blank_optimizer_tensors(
    model: nn.Module, saved: Any, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Tensors to load optimizer states into: like the parameters that they belong to, others on the CPU."""
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    blanks: dict[str, Tensor] = {}
    for number, entry in enumerate(saved if isinstance(saved, list) else []):
        owner = {
            key: name
            for name, values in (entry.get("state") or {}).items()
            for key in tensors_named(values)
            if name in parameters
        }
        for key in tensors_named(entry):
            if not key.startswith(f"{OPTIMIZER}.{number}."):
                raise ProblemError(f"the checkpoint names the tensor {key!r}, which it does not have")
            blanks |= blank_tensors({_TENSOR: key}, sizes)
            like = parameters.get(owner.get(key, ""))
            if like is not None and like.shape == blanks[key].shape and like.dim():
                blanks[key] = torch.empty_like(like, dtype=blanks[key].dtype, requires_grad=False)
    return blanks


def blank_tensors(data: Any, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Tensors on the CPU to load what `join_state` will ask for."""
    blanks = {}
    for key in tensors_named(data):
        if key not in sizes:
            raise ProblemError(f"the checkpoint names the tensor {key!r}, which it does not have")
        blanks[key] = torch.empty(sizes[key][0], dtype=sizes[key][1])
    return blanks


def require_same_tensors(
    mine: Mapping[str, Tensor], sizes: Mapping[str, tuple[torch.Size, torch.dtype]], where: str
) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        ModelError: The text names the first parameters or buffers that differ.
    """
    saved = {name for name in sizes if name.startswith(f"{MODEL}.")}
    plain = len(MODEL) + 1
    different = [f"{name[plain:]!r} is in the checkpoint only" for name in sorted(saved - mine.keys())]
    different += [f"{name[plain:]!r} is in the model only" for name in sorted(mine.keys() - saved)]
    different += [
        f"{name[plain:]!r} is {tuple(sizes[name][0])} in the checkpoint and {tuple(tensor.shape)} in the model"
        for name, tensor in mine.items()
        if name in saved and sizes[name][0] != tensor.shape
    ]
    if different:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise ModelError(
            f"{where} is of another model: {'; '.join(different[:_SHOWN])}{more}; build the model that was trained"
        )


def random_states(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """States of this rank's random generators: of the CPU and, if the model is on one, of the card."""
    states = {f"{RANDOM}.{rank}.cpu": torch.get_rng_state()}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        states[f"{RANDOM}.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(model: nn.Module, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Restore this rank's random generators, as far as the checkpoint has their states."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if (state := tensors.get(f"{RANDOM}.{rank}.cpu")) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := tensors.get(f"{RANDOM}.{rank}.cuda")) is not None:
        torch.cuda.set_rng_state(state, device)
