"""Random models on random meshes and batches: the run is equal to the model in float64, or a typed error is raised."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from partitioner import LocalRanks
from tests.example_counts import examples
from tests.helpers.grammar_judge import Outcome, judge
from tests.helpers.grammar_recipes import Mesh, Op, Recipe
from tests.helpers.grammar_strategies import MORE_RANKS, ONE_RANK, TWO_RANKS, recipes

pytestmark = pytest.mark.usefixtures("without_baselines")

_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
_FAST = settings(
    max_examples=examples(60, quick=5),
    derandomize=True,
    database=None,
    phases=_PHASES,
    suppress_health_check=list(HealthCheck),
)
_LONG = settings(_FAST, max_examples=2000)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    """Processes of two ranks, which start once."""
    with LocalRanks(2) as ranks:
        yield ranks


def check(recipe: Recipe, ranks: LocalRanks | None = None, *, verify: bool = False) -> Outcome:
    """Fails where a recipe's outcome is a failure, and says how to make the recipe again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the odd models that are drawn
        outcome = judge(recipe, ranks, verify=verify)
    if currently_in_test_context():
        event(outcome.kind)
    assert not outcome.is_failure, f"{outcome.kind}: {outcome.text}\n{recipe!r}"
    return outcome


@_FAST
@given(recipes(ONE_RANK * 2 + TWO_RANKS, most=2), st.integers(0, 4))
def test_random_models_are_exact_or_refused(recipe: Recipe, number: int):
    check(recipe, verify=number == 0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@_LONG
@given(recipes(ONE_RANK + TWO_RANKS + MORE_RANKS), st.integers(0, 4))
def test_many_random_models_are_exact_or_refused(recipe: Recipe, number: int):
    check(recipe, verify=number == 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(_FAST, max_examples=200)
@given(recipes(ONE_RANK + TWO_RANKS))
def test_random_models_on_processes(pool: LocalRanks, recipe: Recipe):
    check(recipe, pool)


def test_recipes_print_as_they_are_made():
    recipe = Recipe((Op("linear", 1), Op("repeated", body=(Op("mlp"),))), Op("mse", b=2), Mesh(dp=2), change="values")
    assert (
        repr(recipe)
        == "Recipe((Op('linear', a=1), Op('repeated', body=(Op('mlp'),))), loss=Op('mse', b=2), mesh=Mesh(dp=2))"
    )
    assert eval(repr(recipe)) == recipe


def test_most_recipes_run():
    """The property says nothing of what is refused: of plain models nearly none may be."""
    plain = ("linear", "layer_norm", "attention", "activation", "unary", "gain", "mlp", "conv1d", "embedding", "pool")
    outcomes = Counter(check(Recipe((Op(name, 1), Op("linear")), mesh=Mesh(dp=2))).kind for name in plain)
    assert outcomes == {"equal": len(plain)}
