"""Write ``docs/cli.md``, the reference of the command line, from the commands: ``python docs/site/write_cli.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from partitioner.cli.app import app

PAGE = Path(__file__).resolve().parents[1] / "cli.md"

_HEAD = """\
# Command line

`partitioner` has a command for each function of the public interface. `python -m partitioner` is the same program.
This page is written by `python docs/site/write_cli.py` from the commands themselves.

A session, in the root of the repository:

```sh
partitioner plan examples/plain_module.py:example --topology local:4 -o plan.json --svg plan.svg
partitioner plan examples/plain_module.py:example --topology local:4 --pp 2 -o other.json
partitioner show plan.json --memory memory.svg
partitioner explain plan.json
partitioner explain plan.json --why-not dp=4 --model examples/plain_module.py:example
partitioner diff plan.json other.json
partitioner size examples/plain_module.py:example dgx-h100 --nodes 1,2 --minimise time --svg scaling.svg
partitioner budget plan.json --steps 10000 --price 2.50
partitioner verify plan.json examples/plain_module.py:example
partitioner run plan.json examples/plain_module.py:example
partitioner launch plan.json
```

`MODEL` is a [Hugging Face folder](pretrained.md), a `config.json`, a name on the hub, or `FILE.py:FUNCTION`. The
function takes no arguments and returns a model, `(model, inputs)` or
`(model, inputs, loss)`. The inputs are one global batch.

Results go to standard output, errors and progress to standard error. `--debug`, at any position, shows the
traceback of an error. `partitioner --version` prints the version.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | results of a plan, a checked layout or two runs differ; `fit`: the job does not fit |
| 2 | an error that you can correct |
| 3 | a bug in the partitioner |
| 130 | interrupted |
"""


def describe_command_line() -> str:
    """The text of the page."""
    commands: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    return "\n".join([_HEAD, *(_describe_command(name, command) for name, command in commands.items())])


def _describe_command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    shown = [_name_argument(p) if p.required else f"[{_name_argument(p)}]" for p in arguments]
    usage = " ".join(["partitioner", name, *shown, *(["[OPTIONS]"] if options else [])])
    parts = [f"## {name}", command.help, f"```sh\n{usage}\n```"]
    if arguments:
        rows = [f"| `{_name_argument(p)}` | {_cell(p.help)} |" for p in arguments]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if options:
        rows = [f"| {_name_option(p)} | {_cell(p.help)} | {_default_of(p)} |" for p in options]
        parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *rows]))
    examples = re.findall(r"`([^`]+)`", command.epilog or "")
    if examples:
        parts.append("\n".join(["```sh", *examples, "```"]))
    return "\n\n".join(parts) + "\n"


def _name_argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _name_option(parameter: Any) -> str:
    """``--out``, ``-o``, and the negative of a flag that has one."""
    names = sorted([*parameter.opts, *parameter.secondary_opts], key=lambda name: not name.startswith("--"))
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{name}{value if k == 0 else ''}`" for k, name in enumerate(names))


def _default_of(parameter: Any) -> str:
    if parameter.required:
        return "required"
    return "" if parameter.default in (None, False) else f"`{parameter.default}`"


def _cell(text: str | None) -> str:
    """Text for a table, in which a bar would end the cell."""
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(describe_command_line())
