"""Which recipes are drawn. Productions that are known to fail are switched on here, one constant for each kind."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.helpers.grammar_batches import CHANGES, KEEPING
from tests.helpers.grammar_losses import LOSSES
from tests.helpers.grammar_models import OPTIONAL
from tests.helpers.grammar_operators import OPERATORS
from tests.helpers.grammar_recipes import Mesh, Op, Recipe

CHANGED_INPUTS = True
PYTHON_STATE = True
AFFINE_GRADIENTS = True
BENT_GRADIENTS = True
SELECTED_ROWS = True
SUMMED_BUFFERS = True
TENSOR_HOOKS = True

OF_SWITCHES: tuple[tuple[bool, frozenset[str]], ...] = (
    (PYTHON_STATE, frozenset({"python_counter", "python_list", "python_random", "python_time"})),
    (AFFINE_GRADIENTS, frozenset({"affine_gradient"})),
    (BENT_GRADIENTS, frozenset({"bent_gradient"})),
    (SELECTED_ROWS, frozenset({"selected", "chosen_input_rows"})),
    (SUMMED_BUFFERS, frozenset({"running_sum", "running_sum_by_feature", "running_max"})),
    (TENSOR_HOOKS, frozenset({"gradient_hook"})),
)
OFF = frozenset[str]().union(*(names for on, names in OF_SWITCHES if not on))
_WITH_BODY = ("repeated", "stacked", "residual", "twice", "checkpointed")
_NUMBERS = st.integers(0, 29)

ONE_RANK = (Mesh(), Mesh(microbatch_size=2), Mesh(recompute="full"), Mesh(recompute="selective", microbatch_size=1))
TWO_RANKS = (
    Mesh(dp=2),
    Mesh(tp=2),
    Mesh(pp=2),
    Mesh(cp=2),
    Mesh(dp=2, microbatch_size=1),
    Mesh(dp=2, zero=1),
    Mesh(dp=2, zero=3),
    Mesh(pp=2, microbatch_size=2),
    Mesh(tp=2, microbatch_size=2),
    Mesh(tp=2, recompute="full"),
)
MORE_RANKS = (
    Mesh(dp=2, tp=2),
    Mesh(pp=2, dp=2, microbatch_size=1),
    Mesh(tp=4),
    Mesh(dp=4, zero=2),
    Mesh(pp=2, tp=2, microbatch_size=2),
    Mesh(cp=2, dp=2),
    Mesh(pp=3, microbatch_size=1),
    Mesh(dp=3),
    Mesh(cp=2, tp=2),
)


def operators(names: Sequence[str], depth: int) -> st.SearchStrategy[Op]:
    """One operator; those with a body at most ``depth`` deep."""
    plain = st.builds(Op, st.sampled_from([n for n in names if n not in _WITH_BODY]), _NUMBERS, _NUMBERS)
    if depth == 0:
        return plain
    body = st.lists(operators(names, depth - 1), min_size=1, max_size=2).map(tuple)
    return st.one_of(plain, plain, plain, st.builds(Op, st.sampled_from(_WITH_BODY), body=body))


def recipes(
    meshes: Sequence[Mesh], *, most: int = 4, off: frozenset[str] = OFF, changes: bool = CHANGED_INPUTS
) -> st.SearchStrategy[Recipe]:
    """Recipes of up to ``most`` operators."""
    names = [name for name in OPERATORS if name not in off]
    kept = st.sampled_from(KEEPING)
    return st.builds(
        Recipe,
        ops=st.lists(operators(names, 1), min_size=1, max_size=most).map(tuple),
        loss=st.builds(Op, st.sampled_from(list(LOSSES)), _NUMBERS, _NUMBERS),
        mesh=st.sampled_from(meshes),
        change=st.one_of(kept, kept, st.sampled_from(list(CHANGES))) if changes else kept,
        output=st.sampled_from(["scalar", "dict", "values"]),
        options=st.lists(st.sampled_from(OPTIONAL), unique=True).map(tuple),
        batch=st.sampled_from([4, 4, 6, 8]),
        length=st.sampled_from([4, 2, 3, 8]),
        width=st.sampled_from([4, 8, 6]),
        training=st.sampled_from([True, True, True, False]),
    )
