"""What the search asks of the prices of layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.matrices import Matrices
from meshwright.planner.mapping.choice.joint import Cells, Need

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Pricing(Protocol):
    """What the search asks. All times are seconds of a step."""

    @property
    def workload(self) -> Workload: ...

    def stop_at(self, deadline: float) -> None:
        """Solvers are not asked behind this time, on the clock of `time.monotonic`."""
        ...

    @property
    def undecided_s(self) -> float:
        """Of the layout priced last: no mapping that `exact` could not decide on is faster than this."""
        ...

    @property
    def unlisted_s(self) -> float:
        """Of all layouts whose mappings were bounded: no mapping that is not listed is faster than this."""
        ...

    @property
    def overfull(self) -> Sequence[Priced]:
        """Of the layout priced last: mappings that would be faster, but fill a cut beyond what is allowed."""
        ...

    @property
    def prices_matrices(self) -> bool:
        """Whether mappings are parallelism matrices: on regular fabrics."""
        ...

    def lower_bound_s(
        self,
        layouts: Layout,
        numbers_of_groups: Sequence[int] = (),
        *,
        any_schedule: bool = False,
    ) -> FloatArray:
        """Never above `exact`, with the layouts' own or with any of some numbers of shard groups; [n].

        With `any_schedule`, another one of as many virtual stages may take the place of the layouts' own.
        """
        ...

    def degrees_bound_s(self, degrees: Layout, smallest_bubble: FloatArray) -> FloatArray:
        """Never above `exact` of any layout of some degrees, with the least bubble of each pipeline size;
        [n].
        """
        ...

    def least_memory_gib(self, layouts: Layout) -> tuple[FloatArray, IntArray]:
        """Never above the peak of any split, and the least recomputed layers at which that fits; shapes
        [n].
        """
        ...

    def mappings(self, layout: Layout) -> Matrices:
        """Every mapping of one layout."""
        ...

    def recomputed_memory_gib(self, layouts: Layout) -> FloatArray:
        """Never above the peak of any split, with as much recomputed as the layout may; shape [n]."""
        ...

    def relief_bound_s(self, layouts: Layout, numbers_of_groups: Sequence[int]) -> FloatArray:
        """Never above `exact` of the layouts whatever they recompute or offload, with any of some numbers of
        shard groups; [n].
        """
        ...

    def mapping_bounds(
        self, layouts: Layout, numbers_of_groups: Sequence[int] = ()
    ) -> list[MappingBounds]:
        """Bounds under every mapping, for each of some layouts.

        Infinite where another of some numbers of shard groups is no slower under the same mapping.
        """
        ...

    def needs(self, layout: Layout) -> Sequence[Need | None]:
        """What each mapping asks of the slots of an irregular allocation; empty where it asks nothing."""
        ...

    def use_assignment(self, layout: Layout, cells: Cells, value: Callable[[Any], int]) -> None:
        """Takes the assignment of slots to leaves that the one model found for a layout."""
        ...

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """The best mapping, split and recomputation of one layout; None where none fits or beats `cutoff_s`.

        Bounds of minus infinity in `mappings` mean that nothing is to be left out for its bound.
        """
        ...
