"""``check_layout`` on real Gloo ranks: correct layouts raise no alarm, and each fault is named by its cause."""

from __future__ import annotations

import re

import pytest

import partitioner
from partitioner import CheckSetupError, LayoutCheck, RankTimeout, check_layout
from tests.helpers.command_line import invoke
from tests.helpers.layouts.correct_layouts import ON_MORE, ON_TWO
from tests.helpers.layouts.faulty_layouts import CAUSES, ERRORS
from tests.helpers.paths import ROOT

GALLERY = ROOT / "examples" / "gallery"
EXAMPLES = sorted(path.stem for path in GALLERY.glob("*.py") if not path.stem.startswith("small_"))
FAST = ("fsdp", "dtensor_sequence_parallel", "ddp")  # of the correct layouts
FAST_EXAMPLES = ("row_parallel_bias", "dropout_state")


def run(module: str, function: str, ranks: int = 2, timeout: float = 60.0) -> LayoutCheck:
    return check_layout(f"{ROOT / 'tests' / 'helpers' / 'layouts' / module}.py:{function}", ranks, timeout)


def mark_slow(names: list[str], fast: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mark_slow([*ON_TWO, *ON_MORE], FAST))
def test_correct_layouts_raise_no_alarm(name: str):
    found = run("correct_layouts", name, ON_MORE.get(name, 2))
    assert found.ok, str(found)
    assert found.differences == ()
    assert len(found.errors) > 1
    assert max(found.errors.values()) < 1e-11


@pytest.mark.parametrize("name", CAUSES)
def test_faults_are_named(name: str):
    found = run("faulty_layouts", name)
    assert not found.ok
    assert found.differences[0].kind == CAUSES[name], str(found)
    assert "unknown" not in [d.kind for d in found.differences], str(found)


def test_the_module_with_the_same_part_on_all_ranks_is_named():
    """Each rank's part is a part of the right output, but always the same one."""
    text = " ".join(str(run("faulty_layouts", "same_positions")).split())
    assert "the output of position is wrong first: all ranks have the same part of it" in text


def kind_in_text(name: str) -> str:
    """The kind of cause that the docstring of an example promises."""
    (kind,) = re.findall(r"The\s+fault\s+is\s+`([a-z-]+)`", (GALLERY / f"{name}.py").read_text())
    return kind


@pytest.mark.parametrize("name", mark_slow(EXAMPLES, FAST_EXAMPLES))
def test_the_gallery_is_told_apart(name: str):
    fixed = check_layout(f"{GALLERY / name}.py:fixed", 2, 60.0)
    assert fixed.ok, str(fixed)
    faulty = check_layout(f"{GALLERY / name}.py:faulty", 2, 60.0)
    assert kind_in_text(name) in [d.kind for d in faulty.differences if d.kind != "follows"][:2], str(faulty)
    assert "unknown" not in [d.kind for d in faulty.differences], str(faulty)


def test_the_gallery_names_its_sources():
    assert len(EXAMPLES) >= 12
    for name in EXAMPLES:
        assert re.search(r"Reported as [\w.-]+/[\w.-]+#\d+", (GALLERY / f"{name}.py").read_text()), name


@pytest.mark.slow
def test_norms_under_sequence_parallelism_have_a_part_of_the_sequence():
    (found,) = check_layout(f"{GALLERY / 'sequence_parallel_norm'}.py:faulty", 2, 60.0).differences
    assert "each rank has only its own part of the sequence (rank 0: part 0; rank 1: part 1)" in found.cause


def test_interleaved_rows_are_no_fault():
    assert run("faulty_layouts", "permuted_shards").ok


def test_a_missing_reduction_names_its_groups():
    (found,) = run("faulty_layouts", "unaveraged_between_pairs", 4).differences
    assert found.kind == "unaveraged"
    assert "the ranks 0, 2 and 1, 3 is right" in found.cause


def test_two_faults_are_two_differences():
    found = run("faulty_layouts", "two_faults")
    assert {d.kind: d.names for d in found.differences} == {
        "summed": ("grad 0.weight",),
        "missing": ("grad 2.bias",),
    }


def test_shards_without_a_gradient_do_not_hide_a_factor():
    (found,) = run("faulty_layouts", "doubled_rows").differences
    assert (found.kind, found.names) == ("summed", ("grad table.weight",))


def test_no_cause_is_claimed_without_a_relation():
    (found,) = run("faulty_layouts", "noise").differences
    assert (found.kind, found.names) == ("unknown", ("grad 0.weight",))
    assert "cosine" in found.cause


def test_partial_sums_say_what_each_rank_has():
    (found,) = run("faulty_layouts", "unsummed").differences
    assert "At 0.weight, each rank has only its own samples (rank 0: 0-1; rank 1: 2-3)" in found.cause


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_run_is_an_error(name: str):
    kind, text = ERRORS[name]
    with pytest.raises(getattr(partitioner, kind), match=text):
        run("faulty_layouts", name)


def test_ranks_that_hang_are_ended():
    with pytest.raises(RankTimeout, match="rank 1"):
        run("faulty_layouts", "hangs", timeout=5.0)


def test_a_function_can_be_given_itself():
    from tests.helpers.layouts.faulty_layouts import missing

    assert [d.kind for d in check_layout(missing).differences] == ["missing"]
    with pytest.raises(CheckSetupError, match="top level"):
        check_layout(lambda: None)  # type: ignore[arg-type, return-value]


def test_the_command_has_three_exit_codes():
    faults = ROOT / "tests" / "helpers" / "layouts" / "faulty_layouts.py"
    equal = invoke("check", f"{faults}:permuted_shards")
    assert equal.exit_code == 0
    assert "Equal: 5 tensors compared" in equal.stdout
    trained = invoke("check", f"{faults}:trained")  # its gradients are equal
    assert "Different: the 4 tensors compared are equal, and something else differs" in trained.stdout
    differs = invoke("check", f"{faults}:summed", "--rows", "2")
    assert differs.exit_code == 1
    assert "Different: 4 of 5 tensors compared differ" in differs.stdout
    assert "summed: the gradient is 2 times the right one" in differs.stdout
    assert "and 2 more" in differs.stdout
    for given in ("no_setup", "raises", "no_such_function"):
        assert invoke("check", f"{faults}:{given}").exit_code == 2
    assert invoke("check", "no_such_file.py:layout").exit_code == 2
