"""The command ``qsync-opt completion``: a shell's completion script, made from the argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qsync_opt.cli.app import EXIT_OK, Runner
from qsync_opt.registry import Kind, entries

_REGISTERED = {
    "method": Kind.FORMULATION,
    "solver": Kind.SOLVER,
    "indicator": Kind.INDICATOR,
    "costs": Kind.COST_MODEL,
}
"""Options whose values are registered names."""
_FILES = ("PROBLEM", "PLAN", "FILE", "FOLDER", "MODEL.onnx", "CLUSTER.yaml")


def add_completion(parser: argparse.ArgumentParser) -> Runner:
    """Print the completion script of a shell."""
    parser.epilog = (
        "bash: source <(qsync-opt completion bash); zsh: qsync-opt completion zsh > a folder of $fpath/_qsync-opt; "
        "fish: qsync-opt completion fish > ~/.config/fish/completions/qsync-opt.fish"
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="which shell")
    return _completion


def _completion(options: argparse.Namespace) -> int:
    from qsync_opt.cli.app import build_parser

    print(_SCRIPTS[options.shell](describe(build_parser())), end="")
    return EXIT_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One option or positional argument: its spellings, what may follow, and its help."""

    flags: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    is_path: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command (the name is empty for the program itself)."""

    name: str
    text: str
    arguments: tuple[Argument, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings of all options."""
        return tuple(flag for argument in self.arguments for flag in argument.flags)

    @property
    def positional_words(self) -> tuple[str, ...]:
        """What positional arguments may be, where that is a fixed list."""
        return tuple(word for a in self.arguments if not a.flags for word in a.choices)


def describe(parser: argparse.ArgumentParser) -> tuple[Command, ...]:
    """The program and its sub-commands, as far as completion needs to know."""
    commands = [Command(name="", text=parser.description or "", arguments=tuple(_arguments(parser)))]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                commands.append(Command(name=name, text=child.description or "", arguments=tuple(_arguments(child))))
    return tuple(commands)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Argument]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        yield Argument(
            flags=tuple(action.option_strings),
            takes_value=action.nargs != 0,
            choices=_choices(action),
            is_path=metavar in _FILES or action.dest == "output",
            text=(action.help or "").replace("%%", "%"),
        )


def _choices(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    return tuple(entries(_REGISTERED[action.dest])) if action.dest in _REGISTERED else ()


def _bash(commands: tuple[Command, ...]) -> str:
    """Words are compared as they are: no name of ours has a blank or a quote."""
    program, *rest = commands
    names = " ".join(command.name for command in rest)
    cases, values = [], []
    for command in rest:
        words = " ".join((*command.flags, *command.positional_words))
        cases.append(f'        {command.name}) words="{words}" ;;')
        for argument in command.arguments:
            if argument.flags and argument.takes_value:
                pattern = "|".join(f"{command.name}:{flag}" for flag in argument.flags)
                reply = _bash_reply(argument)
                values.append(f"        {pattern}) {reply}; return ;;")
    return "\n".join(
        [
            "# bash completion of qsync-opt; made by: qsync-opt completion bash",
            "_qsync_opt() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local command="" words="" i',
            "    COMPREPLY=()",
            "    for ((i = 1; i < COMP_CWORD; i++)); do",
            f'        case " {names} " in *" ${{COMP_WORDS[i]}} "*) command="${{COMP_WORDS[i]}}"; break ;; esac',
            "    done",
            '    case "$command:$previous" in',
            *values,
            "    esac",
            '    case "$command" in',
            f'        "") words="{" ".join(program.flags)} {names}" ;;',
            *cases,
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '    if [[ -n "$command" && "$current" != -* ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi',
            "}",
            "complete -o filenames -F _qsync_opt qsync-opt",
            "",
        ]
    )


def _bash_reply(argument: Argument) -> str:
    if argument.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(argument.choices)}" -- "$current"))'
    return 'COMPREPLY=($(compgen -f -- "$current"))' if argument.is_path else "COMPREPLY=()"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh(commands: tuple[Command, ...]) -> str:
    def specification(argument: Argument) -> str:
        text = argument.text.replace("[", "(").replace("]", ")").replace(":", "\\:")
        follows = ""
        if argument.takes_value:
            words = f"({' '.join(argument.choices)})" if argument.choices else "_files" if argument.is_path else " "
            follows = f":value:{words}"
        if not argument.flags:
            return _quoted(f"*{follows}" if follows else "*:")
        return " ".join(_quoted(f"{flag}[{text}]{follows}") for flag in argument.flags)

    program, *rest = commands
    described = "\n".join(f"        {_quoted(f'{command.name}:{command.text}')}" for command in rest)
    cases = "\n".join(
        f"        {command.name}) _arguments {' '.join(specification(a) for a in _one_positional(command))} ;;"
        for command in rest
    )
    flags = " ".join(specification(argument) for argument in program.arguments)
    return "\n".join(
        [
            "#compdef qsync-opt",
            "# made by: qsync-opt completion zsh",
            "_qsync_opt() {",
            "    local -a commands",
            "    commands=(",
            described,
            "    )",
            f"    _arguments -C {flags} '1:command:->command' '*::argument:->arguments'",
            "    case $state in",
            "        command) _describe command commands ;;",
            "        arguments) case $words[1] in",
            cases,
            "        esac ;;",
            "    esac",
            "}",
            '_qsync_opt "$@"',
            "",
        ]
    )


def _one_positional(command: Command) -> Iterator[Argument]:
    """Options, and the first positional argument for all of them: zsh takes one rest specification."""
    seen = False
    for argument in command.arguments:
        if argument.flags or not seen:
            yield argument
        seen = seen or not argument.flags


def _fish(commands: tuple[Command, ...]) -> str:
    program, *rest = commands
    lines = ["# fish completion of qsync-opt; made by: qsync-opt completion fish"]
    lines += [
        f"complete -c qsync-opt -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.text)}"
        for command in rest
    ]
    for command in (program, *rest):
        when = f"'__fish_seen_subcommand_from {command.name}'" if command.name else "__fish_use_subcommand"
        for argument in command.arguments:
            spellings = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in argument.flags
            )
            if not argument.flags:
                if argument.choices:
                    lines.append(f"complete -c qsync-opt -n {when} -f -a {_quoted(' '.join(argument.choices))}")
                continue
            follows = ""
            if argument.takes_value:
                follows = f" -x -a {_quoted(' '.join(argument.choices))}" if argument.choices else " -r"
            lines.append(f"complete -c qsync-opt -n {when}{spellings}{follows} -d {_quoted(argument.text)}")
    return "\n".join(lines) + "\n"


_SCRIPTS: dict[str, Callable[[tuple[Command, ...]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
