"""State of a training job: tensors under the names of the plain model, everything else as JSON."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from qsync_opt.errors import ModelError, ProblemError, QSyncError, first_few, first_line
from qsync_opt.io import LARGEST_INTEGER
from qsync_opt.runtimes.torch.checkpoints.storage import Entry, held_part
from qsync_opt.runtimes.torch.ddp import digest
from qsync_opt.runtimes.torch.support import bare_model, first_device, plain_name

_TENSOR, _TUPLE, _ITEMS, _COUNTER, _FLOAT = "$tensor", "$tuple", "$items", "$counter", "$float"
_MARKS = frozenset({_TENSOR, _TUPLE, _ITEMS, _COUNTER, _FLOAT})
DEEPEST = 50
"""Most levels of nested lists and dictionaries; no optimizer has deeper state."""
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def split_state(value: Any, place: str, tensors: dict[str, Tensor], levels: int = DEEPEST) -> Any:
    """The JSON form of dictionaries, lists and tuples of tensors, numbers, texts, truth values and None.

    The tensors are added to ``tensors``, not copied, under names that begin with ``place``, a path with dots.
    ``levels`` is how many may still follow.

    Raises:
        ModelError: Something that has no form in JSON; the text says where.
    """
    if not levels:
        raise ModelError(f"the state at {place[:200]!r} is nested in more than {DEEPEST} levels; leave it out")
    if isinstance(value, Tensor):
        tensors[place] = _detached(value)
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
        if all(type(part) is str for part in value):  # names of an optimizer's parameters are many
            return {_TUPLE: [*value]} if isinstance(value, tuple) else [*value]
        parts = [split_state(part, f"{place}.{i}", tensors, levels - 1) for i, part in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        plain = True
        for key in value:
            if type(key) is str:
                continue
            plain = False
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise ModelError(f"the state at {place!r} has the key {key!r}: texts and integers can be kept")
        entries = {key: split_state(part, f"{place}.{key}", tensors, levels - 1) for key, part in value.items()}
        if isinstance(value, Counter):  # milestones of MultiStepLR, which needs the methods of a Counter
            return {_COUNTER: [[key, part] for key, part in entries.items()]}
        plain = plain and _MARKS.isdisjoint(entries)
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

    if not levels:
        raise ProblemError(f"{where}: state that is nested in more than {DEEPEST} levels: it is not of this package")
    if isinstance(data, float) and not math.isfinite(data):  # a number like 1e999
        fail()
    if isinstance(data, list):
        return [inner(part) for part in data]
    if not isinstance(data, dict):
        return data
    if not _MARKS & data.keys():
        return {key: inner(part) for key, part in data.items()}
    if len(data) != 1:
        fail()
    mark, content = next(iter(data.items()))
    if mark in (_TENSOR, _FLOAT):
        try:
            return tensors[content] if mark == _TENSOR else _FLOATS[content]
        except (KeyError, TypeError):
            raise ProblemError(f"{where}: the tensor {content!r} is missing; give a whole checkpoint") from None
    if not isinstance(content, list):
        fail()
    if mark == _TUPLE:
        return tuple(inner(part) for part in content)
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str | int):
            fail()
    entries = {key: inner(part) for key, part in content}
    return Counter(entries) if mark == _COUNTER else entries


MODEL, OPTIMIZER, OTHER, RANDOM = "model", "optimizer", "other", "random"
"""First parts of the names of tensors."""
Sizes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """State of a job by `split_state`, or joined with its tensors: of the model, its optimizers, and others by name."""

    model: Mapping[str, Any]
    optimizers: tuple[Any, ...]
    others: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a rank saves.

    Attributes:
        tensors: The values that it holds of each tensor, by name, not copied.
        entries: What plans need to know of each.
        values: All that is no tensor.
        shapes: Digest of the names and shapes of the model's tensors.
        stable: Names of tensors that nothing changes but an optimizer's step: the model's parameters that have one,
            and the optimizers' states if there are such parameters.
    """

    tensors: Mapping[str, Tensor]
    entries: Sequence[Entry]
    values: Values
    shapes: str
    stable: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Structure:
    """What a save says of the tensors of a model and its optimizers, as long as names, shapes and types stay the same.

    Training waits while it is worked out, which takes several microseconds a tensor. It holds no tensor.

    Attributes:
        signature: By `_signature`; None if it does not tell all.
        shapes: As in `Collected`.
        entries: As in `Collected`, of the model's tensors, then of those of each parameter's state.
        buffers: Names of the model's buffers among them.
        groups: Names of the parameters in each optimizer's groups, one after the other.
        states: Of each optimizer by parameter, as JSON.
        stable: As in `Collected`.
    """

    signature: Any
    shapes: str
    entries: tuple[Entry, ...]
    buffers: frozenset[str]
    groups: tuple[list[str], ...]
    states: tuple[dict[str, Any], ...]
    stable: frozenset[str]


class JobState:
    """The parts of a job that have state: what a checkpoint holds of them, and how it is loaded.

    Args:
        model: Also inside ``DistributedDataParallel`` or ``torch.compile``.
        optimizers: Their states are saved by the names of the parameters instead of their numbers. Their parameters
            that are not the model's (such as those of a loss) are included.
        others: Objects with ``state_dict`` and ``load_state_dict`` by name.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], others: Mapping[str, Any]
    ) -> None:
        self._wrapped = model
        self._optimizers = optimizers
        self._others = others
        self._structure: _Structure | None = None

    @property
    def _model(self) -> nn.Module:
        return bare_model(self._wrapped)

    def collect(self, rank: int) -> Collected:
        """What a rank saves.

        Raises:
            ModelError: A lazy module has no parameters yet, or a part of the state cannot be in a file.
        """
        others: dict[str, Tensor] = {}
        values = {name: split_state(o.state_dict(), f"{OTHER}.{name}", others) for name, o in self._others.items()}
        rest = {f"{RANDOM}.{rank}.cpu": torch.get_rng_state()}
        if (device := first_device(self._model)).type == "cuda":
            rest[f"{RANDOM}.{rank}.cuda"] = torch.cuda.get_rng_state(device)
        with torch.no_grad():
            tensors, extra, optimizers, structure = self._of_model_and_optimizers(rest)
            # DistributedDataParallel continues with the buffers of rank 0.
            dropped = structure.buffers if rank else frozenset()
            for name in dropped:
                del tensors[name]
            last = [held_part(name, tensor) for name, tensor in (rest if rank else rest | others).items()]
        tensors |= {entry[0]: part for part, entry in last}
        kept = [entry for entry in structure.entries if entry[0] not in dropped] if dropped else structure.entries
        return Collected(
            tensors=tensors,
            entries=[*kept, *(entry for _, entry in last)],
            values=Values(model=extra, optimizers=optimizers, others=values),
            shapes=structure.shapes,
            stable=structure.stable,
        )

    def _of_model_and_optimizers(
        self, rest: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any], tuple[Any, ...], _Structure]:
        """Values held of each tensor by name; extra state of the model and the states of the optimizers as JSON.

        Tensors of an optimizer that belong to no parameter are added to ``rest``.
        """
        model_state = self._model.state_dict(keep_vars=True)
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        params = [[group["params"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        signature, state_tensors = _signature(model_state, states, params)
        extra: dict[str, Any] = {}
        outside: list[Mapping[str, Tensor]] = [{} for _ in states]
        structure = self._structure
        if structure is not None and signature is not None and structure.signature == signature:
            parts = [t if type(t) is Tensor and not t.requires_grad else _values_of(t) for t in state_tensors]
            tensors = {entry[0]: part for entry, part in zip(structure.entries, parts, strict=True)}
        else:
            whole, extra = _split_model(model_state)
            shapes = digest({name: tensor.shape for name, tensor in whole.items()})
            of_model = self._parameter_names()
            named = [self._named_groups(number, of_model) for number in range(len(states))]
            outside = [_outside(each, of_model) for each in named]
            groups = tuple([*chain.from_iterable(each)] for each in named)
            by_name = tuple(
                {names[i]: split_state(v, f"{OPTIMIZER}.{k}.{names[i]}", whole) for i, v in state["state"].items()}
                for k, (names, state) in enumerate(zip(groups, states, strict=True))
            )
            # Keys that JSON cannot tell apart, or that look like marks: names do not follow from them.
            marked = signature is not None and any(_MARKS & entry.keys() for each in by_name for entry in each.values())
            if marked or any(outside):
                signature = None
            tensors, entries = {}, []
            for name, tensor in whole.items():
                tensors[name], entry = held_part(name, tensor)
                entries.append(entry)
            buffers = {f"{MODEL}.{plain_name(name)}" for name, _ in self._model.named_buffers(remove_duplicate=False)}
            structure = self._structure = _Structure(
                signature=signature,
                shapes=shapes,
                entries=tuple(entries),
                buffers=frozenset(buffers & whole.keys()),
                groups=groups,
                states=by_name,
                stable=self._stable(whole),
            )
        optimizers = []
        for number, (names, state) in enumerate(zip(structure.groups, states, strict=True)):
            others = {
                "param_groups": [
                    {**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]
                ],
                "rest": {key: value for key, value in state.items() if key not in ("state", "param_groups")},
                "outside": outside[number],
            }
            split = {key: split_state(value, f"{OPTIMIZER}.{number}.{key}", rest) for key, value in others.items()}
            optimizers.append({"state": structure.states[number], **split})
        return tensors, extra, tuple(optimizers), structure

    def _stable(self, tensors: Iterable[str]) -> frozenset[str]:
        """As in `Collected`."""
        trained = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        parameters = self._model.named_parameters(remove_duplicate=False)
        stable = {f"{MODEL}.{plain_name(name)}" for name, p in parameters if id(p) in trained}
        return frozenset(stable.union(name for name in tensors if name.startswith(f"{OPTIMIZER}.")) if stable else ())

    def wanted(
        self, sizes: Sizes, values: Values, rank: int, model_only: bool, where: str
    ) -> tuple[dict[str, Tensor], Values]:
        """The tensors to load into, given what a checkpoint holds, and the values joined with them.

        Raises:
            ModelError: The checkpoint is of another model, other optimizers or others; the text names what differs.
            ProblemError: The checkpoint is not as this package writes it.
        """
        blanks = _BlankTensors(sizes)
        wanted, _ = _split_model(self._model.state_dict())
        _require_same_tensors(wanted, sizes, where)
        extra = join_state(values.model, blanks, where)
        if model_only:
            return {**wanted, **blanks}, Values(model=extra, optimizers=(), others={})
        if len(values.optimizers) != len(self._optimizers):
            raise ModelError(
                f"{where} has {len(values.optimizers)} optimizers and this job {len(self._optimizers)}: give as many"
            )
        optimizers = tuple(self._join_optimizer(i, entry, blanks, where) for i, entry in enumerate(values.optimizers))
        if missing := values.others.keys() ^ self._others.keys():
            names = ", ".join(sorted(missing))
            raise ModelError(f"{where} and this job differ in {names}: give the same names to Checkpoints")
        others = join_state(values.others, blanks, where)
        random = {name: blanks[name] for name in sizes if name.startswith(f"{RANDOM}.{rank}.")}
        return {**wanted, **blanks, **random}, Values(model=extra, optimizers=optimizers, others=others)

    def load(self, tensors: Mapping[str, Tensor], values: Values, rank: int, model_only: bool, where: str) -> None:
        """Hand what `wanted` returned, with its tensors filled, to the parts of the job.

        Raises:
            ModelError: One of them refuses it.
        """
        model = self._model
        with _loading("the model", where):
            if values.model:
                model.load_state_dict({**model.state_dict(), **values.model})
        if model_only:
            return
        for number, saved in enumerate(values.optimizers):
            self._load_optimizer(number, saved, where)
        for name, other in self._others.items():
            with _loading(name, where):
                other.load_state_dict(values.others[name])
        with _loading("torch's generator", where):
            if (state := tensors.get(f"{RANDOM}.{rank}.cpu")) is not None:
                torch.set_rng_state(state)
            state, device = tensors.get(f"{RANDOM}.{rank}.cuda"), first_device(model)
            if state is not None and device.type == "cuda":
                torch.cuda.set_rng_state(state, device)

    def _join_optimizer(self, number: int, entry: Any, blanks: _BlankTensors, where: str) -> dict[str, Any]:
        """What `collect` made of an optimizer, with tensors: like their parameters, others on the CPU."""
        groups = self._named_groups(number, self._parameter_names())
        known = set(chain.from_iterable(groups))
        try:
            before = [list(group["params"]) for group in entry["param_groups"]]
            unknown = [n for n in (*chain.from_iterable(before), *entry["state"].keys()) if n not in known]
        except (AttributeError, KeyError, TypeError):
            raise ProblemError(
                f"{where}: optimizer {number} is not as this package writes it; give a whole checkpoint"
            ) from None
        count = sum(map(len, before))
        what = None
        if unknown or count != len(known):
            what = f"it has {unknown[0]!r}" if unknown else f"it has {count} parameters and not {len(known)}"
        elif sorted(map(sorted, before)) != sorted(map(sorted, groups)):
            what = f"its {len(before)} groups hold others than the {len(groups)} here"
        if what is not None:
            raise ModelError(
                f"optimizer {number} of {where} is for other parameters: {what}; build the optimizer as before"
            )
        parameters = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        state = {}
        for name, values in entry["state"].items():
            blanks.like = parameters.get(name)
            state[name] = join_state(values, blanks, where)
        blanks.like = None
        parts = {key: join_state(entry.get(key, {}), blanks, where) for key in ("param_groups", "rest", "outside")}
        return {"state": state, **parts}

    def _load_optimizer(self, number: int, saved: Mapping[str, Any], where: str) -> None:
        optimizer, of_model = self._optimizers[number], self._parameter_names()
        named = self._named_groups(number, of_model)
        numbers = {name: index for index, name in enumerate(chain.from_iterable(named))}
        # torch assigns by position: states would go to other parameters if these were in another order before.
        by_names = {tuple(sorted(group["params"])): group for group in saved["param_groups"]}
        present = []
        for own, names in zip(optimizer.param_groups, named, strict=True):
            group = {**by_names[tuple(sorted(names))], "params": [numbers[name] for name in names]}
            present.append(group | ({"param_names": own["param_names"]} if "param_names" in own else {}))
        state = {numbers[name]: values for name, values in saved["state"].items()}
        with _loading(f"optimizer {number}", where):
            optimizer.load_state_dict({**saved["rest"], "state": state, "param_groups": present})
        with torch.no_grad():
            for name, parameter in _outside(named, of_model).items():
                if name in saved["outside"]:
                    parameter.copy_(saved["outside"][name])

    def _parameter_names(self) -> dict[int, str]:
        """Names of the model's parameters by their identity."""
        return {id(parameter): plain_name(name) for name, parameter in self._model.named_parameters()}

    def _named_groups(self, number: int, of_model: Mapping[int, str]) -> list[dict[str, Tensor]]:
        """An optimizer's parameters of each group by name; those that are not the model's are named by their place."""
        return [
            {of_model.get(id(p), f"parameter {place} of group {i}"): p for place, p in enumerate(group["params"])}
            for i, group in enumerate(self._optimizers[number].param_groups)
        ]


_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
_kind = attrgetter("shape", "dtype", "layout", "is_meta")
"""What decides where a tensor lies in a file, and whether it can be in one."""
_sharding = attrgetter("placements", "device_mesh")


def _signature(
    model_state: Mapping[str, Any], states: Sequence[Mapping[str, Any]], params: Sequence[Sequence[Sequence[Tensor]]]
) -> tuple[Any, Sequence[Tensor]]:
    """What the `_Structure` of a model and its optimizers depends on, and their tensors; None where other values are.

    Args:
        model_state: With the parameters themselves.
        states: Of the optimizers.
        params: In each optimizer's groups.
    """
    # Training waits for these passes over all tensors.
    entries = [*chain.from_iterable(state["state"].values() for state in states)]
    if not {*map(type, entries)} <= {dict}:
        return None, ()
    tensors = [*model_state.values(), *chain.from_iterable(map(dict.values, entries))]
    types = [*map(type, tensors)]
    kinds = {*types} - _PLAIN
    if not kinds <= {DTensor}:
        return None, ()
    shardings = [_sharding(tensor) for tensor in tensors if type(tensor) is DTensor] if kinds else []
    # Not of buffers, which may be assigned anew in every step.
    places = [id(tensor) for tensor in model_state.values() if type(tensor) is not Tensor]
    groups = [[[*map(id, group)] for group in own] for own in params]
    numbers = [[*state["state"]] for state in states]
    keys = [*map(tuple, entries)]
    return ([*model_state], places, types, [*map(_kind, tensors)], shardings, groups, numbers, keys), tensors


def _split_model(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a model's ``state_dict`` by ``model.<name>``, and the rest of it (extra state) as JSON.

    Raises:
        ModelError: A lazy module has no parameters yet.
    """
    tensors: dict[str, Tensor] = {}
    rest = {}
    for name, value in state.items():
        if nn.parameter.is_lazy(value):
            raise ModelError(
                f"the parameter {plain_name(name)!r} has no shape yet: run one batch through the model, whose lazy "
                "modules make their parameters then, before checkpoints are saved or loaded"
            )
        if isinstance(value, Tensor):
            tensors[f"{MODEL}.{plain_name(name)}"] = _detached(value)
        else:
            rest[name] = split_state(value, f"{MODEL}.{plain_name(name)}", tensors)
    return tensors, rest


def _detached(tensor: Tensor) -> Tensor:
    """The tensor as it is now: of parameters, frozen ones too, another may take the place of their values."""
    return tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()


def _values_of(tensor: Tensor) -> Tensor:
    """The values that this rank holds, as they are now; `_detached` takes twice as long. To be called under no_grad."""
    return (tensor.to_local() if type(tensor) is DTensor else tensor).data


def _outside(named: Sequence[Mapping[str, Tensor]], of_model: Mapping[int, str]) -> dict[str, Tensor]:
    """The parameters of an optimizer's groups that are not the model's."""
    return {name: parameter for group in named for name, parameter in group.items() if id(parameter) not in of_model}


class _BlankTensors(dict[str, Tensor]):
    """Tensors to load into, created when `join_state` asks for them: on the CPU, or like ``like`` if of its shape."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.like: Tensor | None = None

    def __missing__(self, name: str) -> Tensor:
        shape, dtype = self._sizes[name]
        if self.like is not None and self.like.dim() and self.like.shape == shape:
            self[name] = torch.empty_like(self.like, dtype=dtype, requires_grad=False)
        else:
            self[name] = torch.empty(shape, dtype=dtype)
        return self[name]


@contextlib.contextmanager
def _loading(what: str, where: str) -> Iterator[None]:
    """Name the part of a job that fails to load its state, whatever it raises."""
    try:
        yield
    except QSyncError:
        raise
    except Exception as failure:
        raise ModelError(
            f"{what} does not take its state from {where} ({type(failure).__name__}: {first_line(failure)}): build it "
            "as before, then load again, as other parts of the job have theirs already"
        ) from failure


def sizes_of_old(path: Path, where: str) -> Sizes:
    """Shapes and types of the tensors that a checkpoint of the first format holds, from the headers of its files.

    Raises:
        ProblemError: A header is not usable, or a file not large enough for its tensors.
    """
    most_bytes = sum(entry.stat().st_size for entry in path.iterdir())
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


def _require_same_tensors(mine: Mapping[str, Tensor], sizes: Sizes, where: str) -> None:
    """Refuse a checkpoint of another model, naming the first parameters or buffers that differ."""
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
        raise ModelError(f"{where} is of another model: {first_few(different, '; ')}; build the model that was trained")
