"""Read all programs of a plan, from memory or from a plan file.

A plan file stores a further program as its difference from the earlier program that it resembles most. ``base``: index
of that program; 0 is the first program. ``numbers`` (old -> new): numbers to replace everywhere first, such as a
sequence length, except below the keys in ``constant``, such as the shapes of states. ``rest``: the remaining
difference, in the form of ``differences.py``. ``blocks``: differences of single graphs of blocks (such as layers) from
graphs of other earlier programs, each with its own ``base``, ``numbers`` and changed ``names``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from partitioner.runtime.errors import LaunchError
from partitioner.runtime.family.data import BatchPadding, FurtherProgram, ProgramFamily
from partitioner.runtime.family.differences import (
    Delta,
    apply_delta,
    count_characters,
    describe_form,
    find_changed_scalars,
    make_delta,
    replace_scalars,
)
from partitioner.runtime.program.load import check_program, load_program, read_plan_content
from partitioner.runtime.program.program import Program

_SHORT_DELTA = 300  # number of characters up to which a block's difference is not shortened


def load_family(plan: Any) -> ProgramFamily:
    """Return all programs (training step, evaluation and so on) of ``plan``: a :class:`Program`, a plan, or the path of
    a plan file. Raise :class:`LaunchError` if there is no program, or if the file cannot be read, and
    :class:`UntrustedOperatorError` if a program in the file calls an operator that plan files may not name.
    """
    first = load_program(plan)
    if isinstance(plan, Program):
        return ProgramFamily(first, None, {})
    if not isinstance(plan, str | Path):
        return ProgramFamily(first, getattr(plan, "padding", None), getattr(plan, "further", {}))
    content = unfold_programs(read_plan_content(Path(plan)))
    try:
        further = {n: FurtherProgram.model_validate(data) for n, data in content.get("further", {}).items()}
        padding = content.get("padding")
        family = ProgramFamily(first, None if padding is None else BatchPadding.model_validate(padding), further)
    except (ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise LaunchError(
            f"{plan} does not have programs that this version can read: {error}; make the plan again"
        ) from None
    for one in further.values():
        check_program(one.program, plan)
    return family


def fold_programs(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a plan file in its compact form, in which each program under ``"further"`` (such as an
    evaluation) is stored as its difference from the earlier program that it resembles most. A plan with only one
    program is returned unchanged. ``content``: the content with whole programs, as JSON data.
    """
    if not content.get("further"):
        return content
    programs, forms, folded = [content["program"]], [_describe_blocks(content["program"])], {}
    for name, data in content["further"].items():
        forms.append(_describe_blocks(data["program"]))
        folded[name] = {**data, "program": _fold_program(programs, data["program"], forms)}
        programs.append(data["program"])
    return {**content, "further": folded}


def _describe_blocks(program: Any) -> dict[str, Counter[str]]:
    """Return, for each block (a piece of the model, such as a layer) of ``program`` (JSON data), the number of its
    graph nodes of each form: name of the block -> form -> count. Nodes have the same form (a text, see
    :func:`describe_form`) if they differ only in numbers, such as sizes.
    """
    return {name: Counter(map(describe_form, block["nodes"])) for name, block in program["blocks"].items()}


def _fold_program(programs: list[Any], program: Any, forms: list[dict[str, Counter[str]]]) -> Delta:
    """Return the difference of ``program`` from the most similar of the earlier ``programs``; all are JSON data. The
    result is a dict with the index of this earlier program (``base``), the numbers to replace (``numbers``) and the
    remaining difference (``rest``). ``forms``: for each of ``programs``, and last for ``program``: name of a block ->
    form of a graph node -> number of such nodes.
    """
    alike = [sum(blocks.get(name) == form for name, form in forms[-1].items()) for blocks in forms[:-1]]
    base = max(range(len(programs)), key=lambda n: (alike[n], n))
    numbers = _only_numbers(find_changed_scalars(programs[base], program))
    replaced = replace_scalars(programs[base], numbers)
    constant = [
        key
        for key in replaced.keys() & program.keys() - {"blocks"}
        if count_characters(make_delta(programs[base][key], program[key]))
        < count_characters(make_delta(replaced[key], program[key]))
    ]
    constant.sort()
    rest = make_delta({**replaced, **{key: programs[base][key] for key in constant}}, program)
    of_blocks, found = rest.get("keys", {}).get("blocks", {}).get("keys", {}), {}
    for name in [name for name, delta in of_blocks.items() if count_characters(delta) > _SHORT_DELTA]:
        own = _fold_block(programs, program["blocks"][name], name, forms)
        if own is not None and count_characters(own) < count_characters(of_blocks[name]):
            del of_blocks[name]
            found[name] = own
    more = {"constant": constant, "blocks": found}
    return {"base": base, "numbers": _as_keys(numbers), "rest": rest} | {key: v for key, v in more.items() if v}


def _fold_block(programs: list[Any], block: Any, name: str, forms: list[dict[str, Counter[str]]]) -> Delta | None:
    """Return the difference of ``block`` (a piece of the model, such as a layer) from the block called ``name`` of the
    earlier program in which the graphs of the two blocks share the most nodes of the same form. Return ``None`` if no
    earlier program has a block with this name. All data are JSON data. ``programs``: the earlier programs. ``forms``:
    for each of ``programs``, and last for the program of ``block``: name of a block -> form of a graph node -> number
    of such nodes.
    """
    shared = {n: (blocks[name] & forms[-1][name]).total() for n, blocks in enumerate(forms[:-1]) if name in blocks}
    if not shared:
        return None
    base = max(shared, key=lambda n: (2 * shared[n] - forms[n][name].total(), n))
    old = programs[base]["blocks"][name]
    scalars = find_changed_scalars(old, block)
    names = {a: b for a, b in scalars.items() if type(a) is str}
    rest = make_delta(replace_scalars(old, scalars), block)
    return {"base": base, "numbers": _as_keys(_only_numbers(scalars)), "names": names, "rest": rest}


def _only_numbers(scalars: dict[int | str, int | str]) -> dict[int | str, int | str]:
    return {a: b for a, b in scalars.items() if type(a) is int}


def _as_keys(numbers: dict[int | str, int | str]) -> dict[str, int | str]:
    """Return ``numbers``, a dict: old number -> replacement, with each old number as text, because keys of JSON objects
    are texts.
    """
    return {str(a): b for a, b in numbers.items()}


def unfold_programs(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a plan file with whole programs under ``"further"``, as JSON data. ``content``: the compact
    content, in which each of these programs is stored as its difference from an earlier one. Raise :class:`LaunchError`
    if a difference cannot be applied.
    """
    if not content.get("further"):
        return content
    programs, whole = [content["program"]], {}
    try:
        for name, data in content["further"].items():
            programs.append(_unfold_program(programs, data["program"]))
            whole[name] = {**data, "program": programs[-1]}
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LaunchError(f"the further programs of the plan do not follow from its first one ({error})") from None
    return {**content, "further": whole}


def _unfold_program(programs: list[Any], folded: Any) -> Any:
    """Return the whole program that is stored as ``folded``, its difference from one of the earlier whole ``programs``.
    All are JSON data.
    """
    base = programs[folded.get("base", -1)]  # without it, in files of earlier versions: the previous program
    program = _unfold_part(base, folded)
    blocks = {
        name: _unfold_part(programs[part["base"]]["blocks"][name], part)
        for name, part in folded.get("blocks", {}).items()
    }
    return {**program, "blocks": {**program["blocks"], **blocks}} if blocks else program


def _unfold_part(base: Any, folded: Any) -> Any:
    """Return the JSON data that result from applying the stored difference ``folded`` to ``base``. First, numbers and
    names in ``base`` are replaced, except below the keys in ``folded["constant"]``: ``folded["numbers"]`` and
    ``folded["names"]`` are dicts: old -> new. Then the difference ``folded["rest"]`` is applied.
    """
    numbers, names = folded["numbers"], folded.get("names", {})
    if any(type(b) is not int for b in numbers.values()) or any(type(b) is not str for b in names.values()):
        raise TypeError("a number must be replaced by a number, and a name by a name")  # lists could double the data
    scalars: dict[int | str, int | str] = {int(a): b for a, b in numbers.items()}
    scalars.update(names)
    replaced = replace_scalars(base, scalars) | {key: base[key] for key in folded.get("constant", ())}
    return apply_delta(replaced, folded["rest"])
