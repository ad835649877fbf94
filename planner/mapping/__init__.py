"""Mapping on fragmented allocations: which nodes form which pipeline stage and replica, with a bound."""
