"""Benchmarks: what a step costs in bytes and time, beside peers and entropy bounds, on the same bytes.

`deltaformat bench` runs them. Ratios are of medians, of runs that took turns: a busy machine hits all alike.
"""

from __future__ import annotations

__all__: list[str] = []
