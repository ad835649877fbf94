"""Pipelines of models whose layers differ, through unlike parts, against a brute force of its own."""

from __future__ import annotations

import random
from dataclasses import replace

from meshwright.cluster_specs.reader import PartSpec
from meshwright.planner.mixed.document import MixedRequest
from tests.planner.mixed.test_mixed_optimum import asked
from tests.planner.search.test_unlike_optimum import unlike


def asked_unlike(seed: int) -> MixedRequest:
    """A small problem on two parts, of a model with windows, a hybrid, or with layers of unlike bytes."""
    draw = random.Random(f"unlike {seed}")
    request = asked(seed)
    model = unlike(draw, draw.choice([4, 5, 6])).model_copy(update={"tied_embeddings": False})
    seq_len, hbm = draw.choice([4096, 16_384]), draw.choice([0.7, 1.0, 1.5, 3.0])
    specs, parts = [], []
    for part in request.parts:
        device = part.cluster.device
        device = device.model_copy(update={"hbm_gib": device.hbm_gib * hbm})
        cluster = part.cluster.model_copy(update={"device": device})
        specs.append(PartSpec(cluster=cluster, gpus=part.gpus))
        parts.append(replace(part, cluster=cluster, model=model, seq_len=seq_len))
    spec = request.cluster.model_copy(update={"parts": tuple(specs)})
    return replace(request, cluster=spec, parts=tuple(parts))
