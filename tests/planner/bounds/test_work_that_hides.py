"""Splits whose ranks work unlike sums, where work hides data-parallel traffic: against every partition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest

from meshwright.costmodel.estimate import stage_memory_gib
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import StagedPlacement
from meshwright.costmodel.recount import recounted_placement
from meshwright.costmodel.step_time import exact_step, make_context
from meshwright.model_specs.reader import load_catalog_model
from meshwright.planner.bounds import layer_split
from meshwright.planner.bounds.exact_cost import MappingBounds
from meshwright.planner.bounds.layer_split import SplitCosts, frontier, partitions_of
from meshwright.planner.mapping.effective import PROFILE, PlacedAs
from tests.planner.mapping.irregular import legal_layouts
from tests.planner.mapping.test_stages_apart import one_each_request

Sizes = tuple[int, ...]
MORE_LISTED = pytest.mark.parametrize("most_listed", [0, 8, 1000])


@dataclass(frozen=True)
class Case:
    """Layers in order on ranks of unlike speed, and traffic in proportion to the longest part."""

    costs: SplitCosts
    room: Sizes
    per_layer_s: float
    tail_share: float
    moving_share: float
    slow_down: float

    def priced(self, sizes: Sizes) -> tuple[float, float, float]:
        """Seconds of the pipeline, those of traffic that stay exposed, and all ranks' work."""
        costs, ranks_s, begin = self.costs, [], 0
        for rank, size in enumerate(sizes):
            order = costs.order_of_ranks[rank] if costs.order_of_ranks else costs.order
            part, begin = order[begin : begin + size], begin + size
            again_s = sum(again for _, again in part[: costs.recompute_layers])
            ranks_s.append(sum(own for own, _ in part) + again_s)
        ranks_s[0] += costs.first_s
        ranks_s[-1] += costs.last_s
        work_s, slowest_s = sum(ranks_s), max(ranks_s)
        pipeline_s = costs.num_micro_batches * slowest_s + costs.bubble_share * (work_s - slowest_s)
        sent_s, beside_s = self.sent_s(sizes), costs.hides * work_s
        exposed_s = max(sent_s - beside_s, self.tail_share * sent_s)
        exposed_s += self.slow_down * min(self.moving_share * sent_s, beside_s)
        return pipeline_s, exposed_s, work_s

    def sent_s(self, sizes: Sizes) -> float:
        """What data parallelism sends."""
        return self.per_layer_s * (max((sizes[0] + self.costs.first_load, *sizes[1:])))

    def partitions(self) -> Iterator[Sizes]:
        """Every one that there is room for."""
        layers, fewest = self.costs.layers, self.costs.fewest
        for cuts in combinations(range(1, layers), self.costs.pp - 1):
            sizes = tuple(end - begin for begin, end in pairwise([0, *cuts, layers]))
            if all(fewest <= size <= most for size, most in zip(sizes, self.room, strict=True)):
                yield sizes


def random_case(seed: int) -> Case:
    """Stages that lie unlike each other, or layers recomputed in part, or both."""
    chance = random.Random(seed)
    layers = chance.randint(4, 11)
    pp = chance.randint(2, min(4, layers))
    m = pp * chance.choice([1, 2, 4, 8])
    recomputed = chance.choice([0, 0, 1, 2]) if layers >= 2 * pp else 0
    kinds = [(1.0, 0.3), (1.5, 0.2), (2.0, 1.0)][: chance.choice([1, 1, 3])]
    order = tuple(chance.choice(kinds) for _ in range(layers))
    slower = [chance.choice([1.0, 1.1, 1.5, 2.0]) for _ in range(pp)]
    of_ranks = tuple(tuple((own * by, again * by) for own, again in order) for by in slower)
    return Case(
        costs=SplitCosts(
            pp=pp,
            vpp=1,
            layers=layers,
            num_micro_batches=m,
            bubble_share=chance.choice([1.0, 1.0, 0.3]),
            hides=chance.choice([1.0, m, m]) / pp,
            layer_s=1.0,
            order=of_ranks[slower.index(min(slower))],
            order_of_ranks=of_ranks if len(set(slower)) > 1 else (),
            first_s=chance.random(),
            last_s=2 * chance.random(),
            recompute_layers=recomputed,
            layer_load=1.0,
            first_load=chance.choice([0.0, 0.5, 2.0]),
        ),
        room=tuple(chance.randint(1, layers) if seed % 3 == 0 else layers for _ in range(pp)),
        per_layer_s=chance.choice([0.2, 1, 4, 15, 40]) * m / 8,
        tail_share=chance.choice([0.0, 0.02, 0.2]),
        moving_share=chance.choice([0.3, 0.9, 1.0]),
        slow_down=chance.choice([0.0, 0.0, 0.13, 0.4]),
    )


@MORE_LISTED
def test_no_partition_is_faster_than_the_frontier_says(
    most_listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor than its fastest split where few are looked at one by one, or nothing is open."""
    monkeypatch.setattr(layer_split, "MOST_LISTED", most_listed)
    is_open = 0
    for seed in range(400):
        case = random_case(seed)
        costs, every = case.costs, {sizes: case.priced(sizes) for sizes in case.partitions()}
        fits = (lambda rank, n, _, room=case.room: n <= room[rank]) if seed % 3 == 0 else None
        layer_split._unlimited.cache_clear()
        first = frontier(costs, 0.0, fits)
        assert bool(first) == bool(every)
        if not first:
            continue
        splits = frontier(costs, every[tuple(map(sum, first[0].stages))][1], fits)
        best_s = min(pipeline_s + exposed_s for pipeline_s, exposed_s, _ in every.values())
        parts = [tuple(map(sum, split.stages)) for split in splits]
        hidden = [
            (1 - case.tail_share) * case.sent_s(sizes) / costs.hides if costs.hides else inf
            for sizes in parts
        ]
        found_s = bound_s = inf
        for split, sizes in zip(splits, parts, strict=True):
            pipeline_s, exposed_s, work_s = every[sizes]
            assert split.time_s == pytest.approx(pipeline_s, rel=1e-12)
            least_s, most_s = split.work_range_s
            assert not most_s or most_s == pytest.approx(work_s, rel=1e-12)
            beyond_s = (
                max(most_s - max(least_s, min(hidden)), 0.0) if least_s < max(hidden) else 0.0
            )
            rise = costs.bubble_share + case.slow_down * costs.hides
            found_s = min(found_s, pipeline_s + exposed_s)
            bound_s = min(bound_s, pipeline_s + exposed_s - rise * beyond_s)
        assert bound_s <= best_s * (1 + 1e-9)
        assert found_s == pytest.approx(best_s, rel=1e-9)
        is_open += bound_s < found_s * (1 - 1e-12)
    assert is_open <= (0 if most_listed == 1000 else 20)


@MORE_LISTED
@pytest.mark.parametrize(
    ("number", "layers", "seq_len", "batch", "inside"),
    [
        (33, 8, 1024, 128, ((6, 6), (3, 8), (6, 6))),
        (29, 7, 256, 256, ((5, 5), (3, 3), (6, 8))),
    ],
)
def test_more_work_that_hides_gathers_is_found(
    *,
    number: int,
    layers: int,
    seq_len: int,
    batch: int,
    inside: tuple[tuple[int, int], ...],
    most_listed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeRO-3 in a pipeline of more micro-batches than ranks, its stages at unlike places.

    The split with the least work took up to 3.7 % more, and was called proven.
    """
    monkeypatch.setattr(layer_split, "MOST_LISTED", most_listed)
    layer_split._unlimited.cache_clear()
    request = one_each_request(number)
    pins: dict[str, int | str] = {
        **request.pins, "zero_stage": 3, "recompute": "none", "ep": 8, "tp": 1, "pp": 3,
        "schedule": "1f1b",
    }  # fmt: skip
    request = replace(
        request,
        model=load_catalog_model("olmoe-1b-7b").model_copy(update={"layers": layers}),
        framework="torchtitan",
        seq_len=seq_len,
        global_batch=batch,
        pins=pins,
        without=(),
    )
    tables = legal_layouts(request)
    layout = next(each for each in tables.layouts() if int(each.dp) == 16)
    workload = tables.pricing.workload.on(int(layout.gpus))
    placed = recounted_placement(
        workload.cluster, layout, [divmod(gpu, 8) for gpu in range(int(layout.gpus))]
    )
    stage_ep = np.repeat(placed.ep[None], 3, axis=0)
    stage_ep[:, :2] = inside
    staged = StagedPlacement(**{**vars(placed), "ep": stage_ep.max(axis=0)}, stage_ep=stage_ep)
    one = replace(staged, **{name: np.asarray(m)[None] for name, m in vars(staged).items()})
    table = MappingBounds(
        matrices={PROFILE: np.zeros((1, 1), dtype=np.int64)}, bound_s=np.full(1, -inf)
    )
    pricing = PlacedAs(workload, one)
    priced = pricing.exact(layout, table, inf)
    context, best_s = make_context(workload, layout, staged), inf
    for cuts in combinations(range(1, layers), 2):
        stages = tuple((end - begin,) for begin, end in pairwise([0, *cuts, layers]))
        if np.max(stage_memory_gib(workload, layout, stages)) <= usable_hbm_gib(workload):
            best_s = min(best_s, float(np.asarray(exact_step(context, stages).seconds)))
    assert priced is not None
    assert min(pricing.undecided_s, priced.step_time_s) <= best_s * (1 + 1e-9)
    assert priced.step_time_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_every_partition_is_listed_or_some_of_them_are(seed: int) -> None:
    """`partitions_of` against all tuples of places, tried one by one."""
    rng = np.random.default_rng(seed)
    widths = [1, *rng.integers(1, 5, size=int(rng.integers(1, 5))).tolist()]
    within = [rng.random(shape) < 0.7 for shape in pairwise(widths)]
    every = [
        (0, *ends)
        for ends in product(*(range(width) for width in widths[1:]))
        if all(may_be[cut] for may_be, cut in zip(within, pairwise((0, *ends)), strict=True))
    ]
    listed, is_every = partitions_of(within, 10**6)
    assert is_every
    assert sorted(map(tuple, listed.tolist())) == every
    some, is_every = partitions_of(within, max(len(every) - 1, 1))
    assert is_every == (len(every) <= 1)
    assert len(some) <= max(len(every) - 1, 1)
    assert {*map(tuple, some.tolist())} <= {*every}
