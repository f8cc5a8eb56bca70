"""The largest microbatch and the longest sequence that fit: the next one has no plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from partitioner import (
    CapacityError,
    ConstraintError,
    Constraints,
    check_fit,
    cluster_size,
    largest_that_fits,
    partition,
)
from partitioner.cli.app import app
from partitioner.cluster_size import length_of, lengthen_sequences
from partitioner.passes.errors import InputsError
from partitioner.solve.evaluate import prepared_model
from tests.helpers.linear_towers import Tokens
from tests.helpers.small_clusters import cluster

pytestmark = pytest.mark.usefixtures("without_baselines")

PINS = Constraints(pp=1, tp=1, recompute="none", zero=0)


def test_the_next_sequence_does_not_fit() -> None:
    """2 x 65,792 weights take 16 bytes each, 2.0 MiB of 6. A token's numbers take 1 KiB wherever they are kept or on
    their way, so that some 500 to 2,000 tokens fit in the 4 MiB that are left."""
    with torch.device("meta"):
        model, inputs = Tokens(), (torch.empty(1, 64, 256),)
    found = largest_that_fits(model, cluster(6, 1), inputs, constraints=PINS, multiple=64)
    assert 500 < found.size < 2100 and found.size % 64 == 0
    assert found.too_large == found.size + 64
    assert "too much" in found.reason
    assert f"a sequence of {found.size:,} tokens fits: " in str(found)
    options: dict[str, Any] = dict(constraints=PINS, estimate_only=True)
    assert (
        partition(model, cluster(6, 1), lengthen_sequences(inputs, found.size), **options).estimate
        == found.plan.estimate
    )
    with pytest.raises(CapacityError):
        partition(model, cluster(6, 1), lengthen_sequences(inputs, found.too_large), **options)


def test_the_next_microbatch_does_not_fit() -> None:
    with torch.device("meta"):
        model, inputs = Tokens(), (torch.empty(1, 64, 256),)
    found = largest_that_fits(model, cluster(6, 1), inputs, "microbatch", constraints=PINS)
    assert found.too_large == found.size + 1
    assert found.plan.chosen.microbatch_size == found.size
    tokens = largest_that_fits(model, cluster(6, 1), inputs, constraints=PINS, multiple=64).size
    assert abs(64 * found.size - tokens) <= 64  # it is the tokens that take memory, of one sample or of several
    few = largest_that_fits(model, cluster(6, 1), inputs, "microbatch", constraints=PINS, most=2)
    assert (few.size, few.too_large) == (2, None)
    assert str(few).endswith("; nothing larger was tried")


class _Placed(nn.Module):
    """Adds one of 300 learned positions to each token, so that longer sequences cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.tower = nn.Parameter(torch.empty(300, 256)), Tokens()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x + self.positions[: x.shape[1]])


@pytest.mark.parametrize(("of", "most_captures"), [("sequence", 2), ("microbatch", 2)])
def test_a_model_is_captured_for_the_ends_of_the_search_only(
    of: Any, most_captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = list[int]()
    capture = prepared_model.capture

    def count(*args: Any, **options: Any) -> Any:
        captured.append(1)
        return capture(*args, **options)

    monkeypatch.setattr(prepared_model, "capture", count)
    with torch.device("meta"):
        model, inputs = Tokens(), (torch.empty(1, 64, 256),)
    options: dict[str, Any] = dict(constraints=PINS, multiple=64 if of == "sequence" else 1)
    derived = largest_that_fits(model, cluster(6, 1), inputs, of, **options)
    assert len(captured) == most_captures
    monkeypatch.setattr(cluster_size, "resize_folded", lambda *_: None)
    found = largest_that_fits(model, cluster(6, 1), inputs, of, **options)
    assert len(captured) > 2 * most_captures + 1
    assert (found.size, found.too_large, found.reason) == (derived.size, derived.too_large, derived.reason)
    assert found.plan.estimate == derived.plan.estimate


def test_a_sequence_is_no_longer_than_the_positions_of_the_model() -> None:
    with torch.device("meta"):
        model, inputs = _Placed(), (torch.empty(1, 64, 256),)
    found = largest_that_fits(model, cluster(64, 1), inputs, constraints=PINS, multiple=4, most=4096)
    assert (found.size, found.too_large) == (300, 304)
    assert "300" in found.reason


def test_sequences_are_repeated() -> None:
    ids, mask = torch.tensor([[1, 2, 3]]), torch.ones(1)
    stretched = lengthen_sequences({"ids": ids, "mask": mask}, 7)
    assert stretched["ids"].tolist() == [[1, 2, 3, 1, 2, 3, 1]]
    assert stretched["mask"] is mask
    assert length_of({"mask": mask, "ids": ids}) == 3


def test_what_cannot_be_asked() -> None:
    model, inputs = Tokens(), (torch.zeros(1, 64, 256),)
    with pytest.raises(ConstraintError, match="of must be one of microbatch, sequence; got 'width'"):
        largest_that_fits(model, cluster(6, 1), inputs, "width")  # type: ignore[arg-type]
    with pytest.raises(
        ConstraintError, match="microbatch_size=2 is fixed, but of='microbatch' searches for the largest microbatch"
    ):
        largest_that_fits(model, cluster(6, 1), inputs, "microbatch", constraints=Constraints(microbatch_size=2))
    with pytest.raises(InputsError, match="no input has a sequence dim"):
        largest_that_fits(nn.Linear(4, 1), cluster(6, 1), (torch.zeros(4),))
    with pytest.raises(CapacityError):
        largest_that_fits(model, cluster(1, 1), inputs, constraints=PINS)


def test_the_command_line_finds_it(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        "import torch\nfrom tests.helpers.linear_towers import Tokens\n"
        "def make():\n    return Tokens(), (torch.empty(1, 64, 256),)\n"
    )
    given = ["largest", f"{tmp_path / 'small.py'}:make", "--topology", "dgx-h100", "--most", "256", "--meta"]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 0, told.output
    assert "a sequence of 256 tokens fits: " in " ".join(told.output.split())


def test_images_are_no_sequences() -> None:
    with pytest.raises(InputsError, match="no input has a sequence dim"):
        length_of({"pixels": torch.empty(4, 3, 32, 32), "labels": torch.empty(4)})
    assert length_of((torch.empty(4, 1, 6, 6), torch.empty(4, 6))) == 6  # a square mask, and tokens


@pytest.mark.parametrize("most", [0, -1, 1.5, True])
def test_a_largest_size_that_is_no_size_is_refused(most: Any) -> None:
    with pytest.raises(ConstraintError, match="most must be a whole number, 1 or more; got"):
        largest_that_fits(Tokens(), cluster(6, 1), (torch.empty(1, 64, 256),), most=most)


def test_sequences_that_are_longer_than_the_largest_size_are_refused() -> None:
    with pytest.raises(ConstraintError, match="sequences of 64 tokens, from which the search starts, but most=32"):
        largest_that_fits(Tokens(), cluster(6, 1), (torch.empty(1, 64, 256),), most=32)


def test_a_price_without_a_run_or_below_zero_is_refused() -> None:
    inputs = (torch.empty(1, 64, 256),)
    with pytest.raises(
        ConstraintError,
        match="price=2 without tokens: the price is used for the cost of a training run; expected tokens",
    ):
        check_fit(Tokens(), cluster(6, 1), inputs, price=2)
    with pytest.raises(InputsError, match="price must be a positive number; got -1"):
        check_fit(Tokens(), cluster(6, 1), inputs, price=-1, tokens=1e6)
