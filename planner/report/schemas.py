"""JSON Schemas of the files that people write."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.errors import InputError
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.many.jobs import JobsDoc
from meshwright.planner.many.sizes import FleetJobDoc
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.run_schema import RunDoc

SCHEMA_KINDS = ("model", "cluster", "run", "jobs", "plan")


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind of file. Raises InputError for a kind that there is not."""
    if kind not in SCHEMA_KINDS:
        raise InputError("not a kind of file", where="schema", value=kind, allowed=SCHEMA_KINDS)
    documents: dict[str, type[BaseModel]] = {
        "model": ModelSpec,
        "cluster": ClusterSpec,
        "run": RunDoc,
        "plan": Plan,
        "jobs": JobsDoc,
    }
    schema = documents[kind].model_json_schema(by_alias=True)
    if kind == "jobs":
        _describe_jobs(schema)
    if kind == "cluster":
        _accept_references(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _describe_jobs(schema: dict[str, Any]) -> None:
    """Jobs are read one by one, so that a bad one stops no other: here they are spelt out."""
    job = FleetJobDoc.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
    schema.setdefault("$defs", {}).update(job.pop("$defs", {}))
    schema["$defs"]["job"] = job
    schema["properties"]["jobs"]["items"] = {"$ref": "#/$defs/job"}


def _accept_references(schema: dict[str, Any]) -> None:
    """A cluster file may name its device or start from a catalog entry, which fills in the rest."""
    properties = schema["properties"]
    device = properties["device"]
    properties["device"] = {
        "anyOf": [device, {"type": "string", "description": "A name of `catalog devices`."}]
    }
    properties["base"] = {
        "type": "string",
        "description": "A name of `catalog clusters` to start from.",
    }
    schema.pop("required", None)
    schema["anyOf"] = [{"required": ["device"]}, {"required": ["base"]}]
