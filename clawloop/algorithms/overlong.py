"""Overlong shaping: a smooth penalty on replies that come near the length limit.

Knows nothing about verdicts except that a sample without one is left alone.
"""

from __future__ import annotations


def overlong_penalty(tokens: int, *, limit_tokens: int, cache_tokens: int, cut_by_length: bool) -> float:
    """0 up to limit − cache; then falling straight to −1 at the limit; −1 above it, or when cut by length.

    Args:
        tokens: response tokens, > 0.
        limit_tokens: L_max.
        cache_tokens: L_cache, the width of the slope; 0 < cache ≤ limit.
        cut_by_length: the reply did not end by itself.

    Raises:
        ValueError: a slope that does not fit below the limit.
    """
    if not 0 < cache_tokens <= limit_tokens or tokens < 0:
        raise ValueError(f"{tokens} tokens with limit {limit_tokens} and cache {cache_tokens}")
    if cut_by_length or tokens > limit_tokens:
        return -1.0
    # +0.0: a penalty of nothing is 0, not −0.
    return min(0.0, (limit_tokens - cache_tokens - tokens) / cache_tokens) + 0.0
