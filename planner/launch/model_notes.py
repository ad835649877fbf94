"""Notes on what a framework's launch trains otherwise than the model's specification says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshwright.model_specs.schema import ModelSpec
from meshwright.model_specs.stated_fields import stated_fields

Shortfalls = Mapping[str, str]
"""Sentences on what a launch file cannot say, by the model's field that it concerns."""


def notes_of(model: ModelSpec, said: Collection[str], shortfalls: Shortfalls) -> tuple[str, ...]:
    """The notes of a launch: nothing that a specification states is dropped without one.

    Parameters
    ----------
    model
        The model to be trained.
    said
        Its fields, by dotted name, that the framework's launch files carry.
    shortfalls
        What is known to differ.
    """
    silent = [
        f"{name}: {value} is not part of the launch."
        for name, value in stated_fields(model).items()
        if name not in said and name not in shortfalls
    ]
    return (*shortfalls.values(), *silent, *file_notes(model))


def file_notes(model: ModelSpec) -> tuple[str, ...]:
    """What the model's file says and no launch can know, as the description does not hold it."""
    if not model.left_out:
        return ()
    named = ", ".join(model.left_out)
    return (f"Of the model's config.json this is not part of the launch: {named}.",)
