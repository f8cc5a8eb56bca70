"""Present a profile: as a topology file with the errors as comments, and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import yaml
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from partitioner.profile.fit import FitError
from partitioner.topology import Topology

_DIGITS = 4


def machine_yaml(topology: Topology, errors: Sequence[FitError], machine: str) -> str:
    """Return ``topology``, which was fitted to measured times, as YAML text that :meth:`Topology.load` reads, with
    numbers rounded to four digits. Comments at its start list ``errors``: for each kind of kernel or collective, the
    deviation of the times that the topology predicts from the measured times. ``machine``: a text that names the
    machine."""
    lines = [f"# Measured by `partitioner profile` on {machine}.", "#"]
    lines.append("# Median error of the fitted figures against the times that were measured:")
    lines += [f"#   {e.what:<24} {e.median:>6.1%}  of {e.num_samples} times" for e in errors]
    if warning := large_errors(errors):
        lines += ["#", *(f"# {line}" for line in wrap(warning, 110))]
    data = _round_numbers(topology.model_dump(mode="json", exclude_defaults=True))
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join(lines) + "\n\n" + text


def large_errors(errors: Sequence[FitError]) -> str:
    """Return a warning that names the kinds of kernels and collectives with a median error over 25 %; ``""`` if there
    are none. ``errors``: for each kind, the deviation of predicted from measured times."""
    far = [f"{e.what} ({e.median:.0%})" for e in errors if e.is_large]
    if not far:
        return ""
    return (
        f"Warning: the fitted figures are far from the measured times of {', '.join(far)}. Measure again on an idle "
        "machine, without --quick, before plans are made with them."
    )


def _round_numbers(value: Any) -> Any:
    """Return a copy of ``value``, nested dicts and lists, with all floats rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {k: _round_numbers(v) for k, v in value.items()}
    return [_round_numbers(v) for v in value] if isinstance(value, list | tuple) else value


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes each list of numbers on one line."""


def _represent_row(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    """Return the YAML node of the list ``data``: on one line if it holds only numbers, otherwise in the default style.
    ``dumper``: the YAML dumper that writes it."""
    plain = all(isinstance(v, int | float) for v in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


_Dumper.add_representer(list, _represent_row)


def profile_parts(topology: Topology, errors: Sequence[FitError]) -> Iterator[RenderableType]:
    """Yield what the terminal shows of a profile, a topology that was fitted to measured times: a table of ``errors``
    (for each kind of kernel or collective, how far predicted times are from measured ones), a warning if some are
    large, and a sentence if the ranks of ``topology`` share CPU cores.
    """
    table = Table("fit", "times", "median error", title_justify="left", box=None, pad_edge=False)
    for error in errors:
        table.add_row(error.what, str(error.num_samples), f"{error.median:.1%}")
    yield table
    if warning := large_errors(errors):
        yield Text(warning, style="yellow")
    concurrent = topology.nodes[0].concurrent
    if concurrent is not None:
        yield Text(f"{topology.num_devices} ranks share the cores: {concurrent:g} of them compute at a time.")
