"""HBM of CUDA graphs: a record for each captured kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cluster_specs.reader import read_cluster
from meshwright.costmodel.buffers import graph_bytes
from meshwright.costmodel.execution_names import GraphScope
from meshwright.costmodel.footprint import stage_memory_gib
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.reader import load_catalog_model

DENSE = Workload(
    model=load_catalog_model("llama-3-8b"),
    cluster=read_cluster("dgx-h100"),
    gpus=8,
    global_batch=128,
    seq_len=8192,
)
EXPERTS = replace(DENSE, model=load_catalog_model("mixtral-8x7b"), precision="mxfp8")


@pytest.mark.parametrize(
    ("work", "scope", "pp", "kernels"),
    [
        (DENSE, "none", 1, 0),
        (DENSE, "partial", 1, 32 * 40),
        (DENSE, "partial", 2, 16 * 40 * 64),
        (DENSE, "full", 1, 32 * 40 * 64),
        (EXPERTS, "feed_forward", 2, 16 * 30 * 64),
        (EXPERTS, "partial", 2, 16 * 110 * 64),
        (EXPERTS, "full", 2, 16 * 160 * 64),
    ],
)
def test_kernels_are_counted(work: Workload, scope: GraphScope, pp: int, kernels: int) -> None:
    layout = Layout(dp=2, pp=pp, num_micro_batches=64)
    counted = graph_bytes(replace(work, cuda_graph=scope), layout)
    assert counted == pytest.approx(10 * 1024 * kernels)


def test_a_rank_holds_its_graphs() -> None:
    layout = Layout(dp=8, num_micro_batches=16)
    plain, captured = (
        stage_memory_gib(replace(DENSE, cuda_graph=scope), layout, ((32,),))
        for scope in ("none", "full")
    )
    assert np.allclose(captured - plain, 10 * 1024 * 32 * 40 * 16 / 2**30)
