"""Files made to exhaust memory, stack or time: each is refused or taken in a process with little of all three."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).resolve().parent
MEBIBYTE = 2**20
# Imports once, then takes each file in a process of its own that has little memory and time.
SERVER = """
import json, os, resource, sys, time
sys.path.append(sys.argv[1])
from pathlib import Path
from loader_corpus import loaders, run_loader
known = {loader.name: loader for loader in loaders(core_only=True)}
for line in sys.stdin:
    name, path, memory = json.loads(line)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 3
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            code = {"taken": 0, "refused": 1}[run_loader(known[name], Path(path))]
        except BaseException as error:
            print(type(error).__name__, str(error)[:300].replace(chr(10), " "), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def outcome():
    """``taken`` or ``refused``, within some memory beyond the imports' and 20 seconds of processor time."""
    command = [sys.executable, "-P", "-c", SERVER, str(FOLDER)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as server:

        def ask(loader, path, memory_bytes):
            server.stdin.write(json.dumps([loader, str(path), memory_bytes]) + "\n")
            answer = server.stdout.readline().strip()
            if answer not in ("0", "1"):
                reason = server.stderr.readline() if answer == "3" else "ended by the limit of time or a crash"
                pytest.fail(f"the process ended with {answer}: {reason}")
            return ("taken", "refused")[int(answer)]

        yield ask
        server.stdin.close()


def nested(kind, depth):
    return kind[0] * depth + "0" + kind[1] * depth


JSON_FILES = {
    "nested lists": lambda: '{"format": "qsync-plan/1", "problem": "p", "devices": ' + "[" * 10**6,
    "nested objects": lambda: '{"format": "qsync-plan/1", "problem": "p", "devices": ' + '{"a":' * 10**6,
    "nested extension": lambda: '{"format": "qsync-plan/1", "x-a": ' + nested("[]", 20000) + "}",
    "an extension as deep as is read": lambda: (
        '{"format": "qsync-plan/1", "problem": "p", "devices": {"T4": {"a": "FP32"}}, "x-a": ' + nested("[]", 199) + "}"
    ),
    # An error that shows such a value must not fail itself.
    **{
        f"a precision {depth} lists deep": lambda depth=depth: (  # type: ignore[misc]
            '{"format": "qsync-plan/1", "problem": "p", "devices": {"T4": {"a": ' + nested("[]", depth) + "}}}"
        )
        for depth in (190, 500, 900, 950, 970)
    },
    "a number of a million digits": lambda: '{"format": "qsync-plan/1", "problem": ' + "1" * 10**6 + "}",
    "a number with a large exponent": lambda: '{"format": "qsync-plan/1", "problem": 1e999999999}',
    "a text of 20 MB": lambda: '{"format": "qsync-plan/1", "problem": [], "devices": "' + "x" * (20 * MEBIBYTE) + '"}',
    "200,000 keys": lambda: json.dumps({"format": "qsync-plan/1", **dict.fromkeys(map(str, range(200_000)), 0)}),
    "a name of 20 MB": lambda: json.dumps({"format": "qsync-plan/1", "devices": {"T4": {}}, "y" * (20 * MEBIBYTE): 1}),
    "lone surrogates": lambda: '{"format": "qsync-plan/1", "problem": "\\ud800", "devices": {"\\udfff": {"a": "b"}}}',
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_json(name, tmp_path, outcome):
    path = tmp_path / "plan.json"
    path.write_text(JSON_FILES[name]())
    found = outcome("plan", path, 500 * MEBIBYTE)
    assert found == ("taken" if name == "an extension as deep as is read" else "refused")


def bomb(levels, width):
    """Lists of references to lists of references: few bytes that stand for ``width ** levels`` elements."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


YAML_FILES = {
    "aliases in the data": lambda: bomb(12, 10),
    "aliases in an extension": lambda: f"x-a:\n  {bomb(12, 10)}".replace("\n", "\n  ") + "\nname: a\n",
    "an alias of its own list": lambda: "name: &a [*a]\n",
    "merged aliases": lambda: "\n".join(
        ["a0: &a0 {k: v}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))]
    ),
    "nested flow": lambda: "name: " + "[" * 10**5,
    "nested blocks": lambda: "\n".join(" " * i + "a:" for i in range(3000)),
    "an object": lambda: "name: !!python/object/apply:os.system ['touch executed']\n",
    "an object by a new tag": lambda: "name: !!python/name:os.system\n",
    "a hexadecimal number of 100,000 digits": lambda: (
        f"name: a\ndevices: [{{name: T4, memory: 1, count: 0x{'f' * 10**5}}}]"
    ),
    "a decimal number of 100,000 digits": lambda: f"name: {'1' * 10**5}",
    "a number to the base sixty": lambda: "name: 1" + ":59" * 10**4,
    "a key of 100,000 hexadecimal digits": lambda: f"0x{'f' * 10**5}: a",
    "20 MB of text": lambda: "name: " + "x" * (20 * MEBIBYTE),
    "many documents": lambda: "---\na: 1\n" * 1000,
}


@pytest.mark.parametrize("name", YAML_FILES)
def test_yaml(name, tmp_path, monkeypatch, outcome):
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML_FILES[name]())
    monkeypatch.chdir(tmp_path)
    assert outcome("cluster", path, 700 * MEBIBYTE) == "refused"
    assert not (tmp_path / "executed").exists()


def model(nodes, shape=(2, 2), initializers=(), result=None):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
        list(initializers),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def huge_dims():
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**40, 2**40])
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], (2, 2**40), [tensor])


def many_dims():
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62] * 30000)
    return model([helper.make_node("Mul", ["x", "w"], ["y"])], (2, 2), [tensor])


def constants(*nodes, **values):
    return model(nodes, (2, 2), [numpy_helper.from_array(np.asarray(v), k) for k, v in values.items()])


ONNX_FILES = {
    "huge weights without data": huge_dims,
    "a shape of 30,000 dimensions": many_dims,
    "a constant of a shape as large as memory": lambda: constants(
        helper.make_node("ConstantOfShape", ["s"], ["c"]),
        helper.make_node("Add", ["x", "c"], ["y"]),
        s=np.array([2**40]),
    ),
    "an expansion as large as memory": lambda: constants(
        helper.make_node("Expand", ["v", "s"], ["c"]),
        helper.make_node("Add", ["x", "c"], ["y"]),
        s=np.array([2**36]),
        v=np.float32(1),
    ),
    "a range as large as memory": lambda: constants(
        helper.make_node("Range", ["a", "b", "c"], ["r"]),
        helper.make_node("Add", ["x", "r"], ["y"]),
        a=np.float32(0),
        b=np.float32(1e12),
        c=np.float32(1),
    ),
    "repeated concatenation of constants": lambda: constants(
        *(helper.make_node("Concat", [f"c{i}"] * 2, [f"c{i + 1}"], axis=0) for i in range(40)),
        helper.make_node("Add", ["x", "c40"], ["y"]),
        c0=np.ones(512, np.float32),
    ),
    "an equation of a million letters": lambda: model(
        [helper.make_node("Einsum", ["x"], ["y"], equation="i" * 10**6 + "->i")]
    ),
    "a chain of 20,000 nodes": lambda: model(
        [helper.make_node("Relu", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(19999)]
        + [helper.make_node("Relu", ["v19999"], ["y"])],
        (2, 2),
        result=(2, 2),
    ),
    "graphs within graphs": lambda: nested_graph(20),
    "functions that call functions": lambda: doubling_functions(40),
}


def nested_graph(depth):
    inner = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "inner", [], [])
    for _ in range(depth):
        inner = helper.make_graph([helper.make_node("Loop", ["x"], ["z"], body=inner)], "outer", [], [])
    return model([helper.make_node("Loop", ["", "", "x"], ["y"], body=inner)])


def doubling_functions(levels):
    """Each function calls the one below twice: inlined they would be 2**levels nodes."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function("own", "F0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets),
    ]
    for i in range(1, levels):
        nodes = [
            helper.make_node(f"F{i - 1}", ["a"], ["m"], domain="own"),
            helper.make_node(f"F{i - 1}", ["m"], ["b"], domain="own"),
        ]
        functions.append(helper.make_function("own", f"F{i}", ["a"], ["b"], nodes, opsets))
    proto = model([helper.make_node(f"F{levels - 1}", ["x"], ["y"], domain="own")], result=(2, 2))
    proto.opset_import.append(helper.make_opsetid("own", 1))
    proto.functions.extend(functions)
    return proto


@pytest.mark.parametrize("name", ONNX_FILES)
def test_onnx(name, tmp_path, outcome):
    path = tmp_path / "m.onnx"
    path.write_bytes(ONNX_FILES[name]().SerializeToString())
    outcome("onnx", path, 1000 * MEBIBYTE)  # taken where the sizes can be counted, which needs no memory


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "link.bin", "folder/../../secret.bin"])
def test_external_data_is_not_read_from_elsewhere(location, tmp_path, outcome):
    """Neither by way of the path nor of a link; the secret must not come out in a message either."""
    (tmp_path / "secret.bin").write_bytes(b"secret  " * 8)
    inside = tmp_path / "inside"
    (inside / "folder").mkdir(parents=True)
    (inside / "link.bin").symlink_to(tmp_path / "secret.bin")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    path = inside / "m.onnx"
    path.write_bytes(model([helper.make_node("MatMul", ["x", "w"], ["y"])], (2, 2), [tensor]).SerializeToString())
    onnx.load(path, load_external_data=False)
    assert outcome("onnx", path, 1000 * MEBIBYTE) == "taken"  # the graph needs no data
    assert outcome("onnx weights", path, 1000 * MEBIBYTE) == "refused"


@pytest.mark.parametrize("loader", ["plan", "cluster"])
def test_a_file_without_end_is_refused(loader, outcome):
    assert outcome(loader, "/dev/zero", 1500 * MEBIBYTE) == "refused"


def test_a_function_that_calls_itself(tmp_path, outcome):
    proto = doubling_functions(3)
    proto.functions[0].node[0].CopyFrom(helper.make_node("F2", ["a"], ["b"], domain="own"))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert outcome("onnx", tmp_path / "m.onnx", 1000 * MEBIBYTE) == "refused"


def test_functions_are_written_out(tmp_path, outcome):
    (tmp_path / "m.onnx").write_bytes(doubling_functions(4).SerializeToString())
    assert outcome("onnx", tmp_path / "m.onnx", 1000 * MEBIBYTE) == "taken"
