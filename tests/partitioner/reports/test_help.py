"""``help()`` of the public names shows the words of this project, and nothing of pydantic's."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest
from pydantic import BaseModel

import partitioner
from partitioner import Constraints, ExecutionProfile, partition
from partitioner.passes.documented_model import HEADING, strip_fields
from partitioner.plans.files import plan_schema

MODELS = {
    name: model
    for name in partitioner.__all__
    if isinstance(model := getattr(partitioner, name), type) and issubclass(model, BaseModel)
}


def page(of: object) -> str:
    return pydoc.render_doc(of, renderer=pydoc.plaintext)


def test_there_are_public_models():
    assert {"Constraints", "ExecutionProfile", "Plan", "Certificate", "Estimate", "Candidate", "Topology"} <= set(
        MODELS
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_field_is_listed_with_its_meaning(name: str):
    model, text = MODELS[name], " ".join(page(MODELS[name]).replace("|", " ").split())
    for field, info in model.model_fields.items():
        assert f" {field}: " in text
        assert info.description, field
        assert " ".join(info.description.split()) in text, field


@pytest.mark.parametrize("name", MODELS)
def test_what_pydantic_adds_is_left_out(name: str):
    model = MODELS[name]
    own = {n for base in model.__mro__ if base not in (BaseModel, object) for n in vars(base)}
    text = page(model)
    for added in {n for n in dir(BaseModel) if not n.startswith("_")} - own | {"model_config", "__pydantic"}:
        assert added not in dir(model)
        assert not re.search(rf"^ \|  {added}\b", text, re.MULTILINE), added
    assert "inherited from pydantic" not in text
    assert callable(model.model_dump), "which is there all the same"


@pytest.mark.parametrize("name", MODELS)
def test_public_methods_are_shown(name: str):
    model, text = MODELS[name], page(MODELS[name])
    for base in model.__mro__[: model.__mro__.index(BaseModel)]:
        for method, value in vars(base).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                assert f"{method}(" in text, method


def test_a_signature_has_names_and_defaults():
    assert str(inspect.signature(Constraints)).startswith("(*, pp=None, dp=None, cp=None, tp=None")
    assert "overlap=True" in str(inspect.signature(ExecutionProfile))


def test_the_page_of_partition_is_its_docstring():
    text = page(partition)
    assert "Plan how ``model`` runs on ``topology``" in text
    for argument in ("constraints: choices that the user fixes", "profile: another framework", "time_limit_s: "):
        assert argument in text


def test_the_schema_has_the_meaning_of_a_field_once():
    parts = plan_schema()["$defs"]
    assert all(HEADING not in part.get("description", "") for part in parts.values())
    assert parts["Constraints"]["description"] == inspect.cleandoc(strip_fields(Constraints.__doc__ or ""))
    assert parts["Constraints"]["properties"]["tp"]["description"].startswith("Tensor-parallel ranks")
