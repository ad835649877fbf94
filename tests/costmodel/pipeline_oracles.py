"""Activations in flight, counted pass by pass from a simulated schedule."""

from __future__ import annotations

from meshwright.costmodel.simulator import Timeline, Work


def peak_chunks(line: Timeline) -> tuple[int, ...]:
    """Most chunk activations of each rank at a time; weight gradients need them last."""
    change = {Work.FORWARD: 1, Work.INPUT: 0, Work.BACKWARD: -1, Work.WEIGHT: -1}
    peaks = []
    for order in line.passes:
        # A pass that ends a backward pass frees its chunk before the next forward pass makes one.
        in_flight = peak = 0
        for step in order:
            in_flight += change[step.work]
            peak = max(peak, in_flight)
        peaks.append(peak)
    return tuple(peaks)
