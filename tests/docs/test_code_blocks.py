"""Every code block of the documentation runs, and what a block shows as its output is what it prints.

A page is one session in an empty folder in which the repository's folders can be reached by their names:

* ``python``: run, in one namespace per page; with ``title="name.py"``: written to that file instead, as are ``yaml``,
  ``json``, ``toml`` and ``text`` blocks whose title is a file name.
* ``console``: lines after ``$`` are given to bash, what stands between is their output. Without output nothing is
  compared. A command may fail only where the next one is ``echo $?``.
* ``text title="Output"``: what the ``python`` block before prints.
* ``...`` stands for any text. A title with ``figures vary`` compares everything but the numbers.
* ``<!-- not run: reason -->`` before a block leaves it out; these are counted below.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = {
    "README.md",
    "docs/newcomer-walk.md",
    "docs/tutorial.md",
    *(f"docs/how-to/{name}.md" for name in ("add-a-solver", "add-other-plugins", "resume", "in-your-script")),
    *(f"docs/how-to/{name}.md" for name in ("several-device-types", "your-own-model", "predict-steps")),
    *(f"docs/how-to/{name}.md" for name in ("changing-cluster", "checkpoints", "frameworks", "ordinary-training")),
}
REASONS = {"needs a GPU", "installs packages", "needs several processes", "runs for minutes"}
NOT_RUN = {
    "README.md": 1,
    "docs/newcomer-walk.md": 1,
    "docs/how-to/checkpoints.md": 1,
    "docs/how-to/frameworks.md": 1,
    "docs/how-to/messages.md": 1,
    "docs/how-to/ordinary-training.md": 1,
    "docs/background/kernels.md": 1,
}
"""How many blocks of a page are left out: a block more or less must be entered here."""

FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>[\w+-]+)(?P<attributes>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
TITLE = re.compile(r'title="([^"]*)"')
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
# A line that HiGHS writes past Python at times.
NATIVE = re.compile(r"^Highs\w+::.*\n", re.MULTILINE)
FILE_NAME = re.compile(r"^[\w./-]+\.\w+$")
FILES = ("python", "yaml", "json", "toml", "text")
SESSION = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    path = json.loads(line)
    printed, failure = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(open(path, encoding="utf-8").read(), path, "exec"), names)
        except BaseException:
            failure = traceback.format_exc()
    print(json.dumps({"printed": printed.getvalue(), "failure": failure}), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    title: str
    body: str
    reason: str | None
    line: int

    @property
    def is_file(self):
        return self.language in FILES and bool(FILE_NAME.match(self.title))

    @property
    def is_output(self):
        return self.language == "text" and self.title.startswith("Output")

    @property
    def runs(self):
        return self.language in ("python", "console", "bash", "sh", "shell") and not self.is_file


def blocks_of(path):
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        title = TITLE.search(match["attributes"])
        line = text.count("\n", 0, match.start()) + 1
        found.append(
            Block(
                language=match["language"],
                title=title[1] if title else "",
                body=body,
                reason=match["reason"],
                line=line,
            )
        )
    return found


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def normal(text, *, figures_vary):
    text = NATIVE.sub("", text)
    text = NUMBER.sub("#", text) if figures_vary else text
    lines = [re.sub(r"[ \t]+", " ", line).rstrip() if figures_vary else line.rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip("\n")


def matches(shown, printed, *, figures_vary):
    shown, printed = (normal(text, figures_vary=figures_vary) for text in (shown, printed))
    return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), printed, re.DOTALL) is not None


def commands_of(body):
    """Commands of a console block, each with the output that is shown for it."""
    commands = []
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append([line[2:], ""])
        elif commands and commands[-1][0].endswith("\\") and not commands[-1][1]:
            commands[-1][0] += "\n" + line
        elif commands:
            commands[-1][1] += line + "\n"
        else:
            raise ValueError(f"a console block must begin with a command: {line!r}")
    return commands


class Session:
    """Runs the blocks of one page."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("tests", "benchmarks", "examples"):
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        scripts = Path(sys.executable).parent
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "",
        }
        self.process = None
        self.count = 0

    def python(self, block):
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SESSION],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.count += 1
        path = self.folder / f".block-{self.count}.py"
        path.write_text("\n" * block.line + block.body, encoding="utf-8")
        self.process.stdin.write(json.dumps(str(path)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer["failure"] is None, f"line {block.line}:\n{answer['failure']}"
        return answer["printed"]

    def console(self, block):
        commands = commands_of(block.body)
        script, mark = [], "--next-command--"
        for command, _ in commands:
            script += [f'( exit "${{status:-0}}" )\n{command}', "status=$?", f'echo "{mark} $status"']
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        parts = re.split(rf"{mark} (\d+)\n", done.stdout)
        printed, statuses = parts[0::2], [int(status) for status in parts[1::2]]
        assert len(statuses) == len(commands), f"line {block.line}: a command ended the shell\n{done.stdout}"
        following = [*(command for command, _ in commands[1:]), ""]
        for (command, shown), output, status, after in zip(commands, printed, statuses, following, strict=False):
            if status and after != "echo $?":
                log = self.folder / "log.txt"  # to which a page may send what it does not show
                output += log.read_text(encoding="utf-8")[-3000:] if log.exists() else ""
                raise AssertionError(f"line {block.line}: {command!r} ended {status}\n{output}")
            if shown.strip():
                compare(block, shown, output)

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(timeout=250)
            self.process.stdout.close()


def compare(block, shown, printed):
    if not matches(shown, printed, figures_vary="figures vary" in block.title):
        pytest.fail(f"line {block.line}: shown\n{shown.strip()}\nprinted\n{printed.strip()}")


def run_page(path, folder):
    session = Session(folder)
    printed = None
    try:
        for block in blocks_of(path):
            if block.reason is not None:
                printed = None
            elif block.is_file:
                target = folder / block.title
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.body, encoding="utf-8")
            elif block.is_output:
                assert printed is not None, f"line {block.line}: an output without a python block before it"
                compare(block, block.body, printed)
                printed = None
            elif block.language == "python":
                printed = session.python(block)
            elif block.language == "console":
                session.console(block)
    finally:
        session.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name_of(path), marks=[pytest.mark.slow] if name_of(path) in SLOW else [])
        for path in PAGES
        if any(block.runs for block in blocks_of(path))
    ],
)
def test_blocks_run_and_print_what_they_show(path, tmp_path):
    run_page(path, tmp_path)


def test_few_blocks_are_left_out_and_each_says_why():
    blocks = [(name_of(path), block) for path in PAGES for block in blocks_of(path)]
    left_out = [(name, block) for name, block in blocks if block.reason is not None]
    assert {block.reason for _, block in left_out} <= REASONS
    assert all(block.runs for _, block in left_out), "only blocks that would run need the mark"
    assert Counter(name for name, _ in left_out) == Counter(NOT_RUN)
    running = [block for _, block in blocks if block.runs]
    assert len(left_out) <= 0.15 * len(running), f"{len(left_out)} of {len(running)} are left out"


def test_no_command_hides_in_another_language():
    wrong = [
        (name_of(p), b.line, b.language)
        for p in PAGES
        for b in blocks_of(p)
        if b.language in ("bash", "sh", "shell", "pycon", "py")
    ]
    assert not wrong, f"write these as console or python, which are run: {wrong}"


@pytest.mark.parametrize(
    ("shown", "printed", "vary", "expected"),
    [
        ("a 1\n", "a 1\n", False, True),
        ("a 1\n", "a 2\n", False, False),
        ("a 1.50 s\n", "a  22.1 s\n", True, True),
        ("a 1 s\n", "b 1 s\n", True, False),
        ("first\n...\nlast", "first\nx\ny\nlast\n", False, True),
        ("first\n...", "second\n", False, False),
        ("INT8 4\n", "FP16 4\n", True, False),
    ],
)
def test_comparison(shown, printed, vary, expected):
    assert matches(shown, printed, figures_vary=vary) is expected


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ('```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n', "printed\n1"),
        ("```python\nraise ValueError('no')\n```\n", "ValueError: no"),
        ("```console\n$ false\n```\n", "ended 1"),
        ("```console\n$ echo a\nb\n```\n", "printed\na"),
        ("```console\n$ exit 3\n$ echo b\n```\n", "ended the shell"),
    ],
)
def test_a_wrong_page_fails(tmp_path, page, message):
    path = tmp_path / "page.md"
    path.write_text(page)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(message)):
        run_page(path, tmp_path)


def test_a_right_page_passes(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        '```python title="mine.py"\nvalue = 7\n```\n\n```python\nimport mine\n```\n\n'
        '```python\nprint(mine.value)\n```\n\n```text title="Output"\n7\n```\n\n'
        "```console\n$ test -e nothing\n$ echo $?\n1\n$ cat mine.py \\\n  | head -1\nvalue = 7\n```\n"
    )
    run_page(path, tmp_path)
    assert (tmp_path / "mine.py").exists()
