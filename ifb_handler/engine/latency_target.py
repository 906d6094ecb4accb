"""The most tokens a step may have so that running answers keep a target inter-token latency (`target_itl_ms`).

A step's time is taken as a + b * tokens, fitted by least squares to the steps so far, the recent ones weighing most; so
the budget follows the machine, its load and the length of the contexts. The rest of the budget that decodes leave goes
to prompts, as ever (Sarathi-Serve, OSDI 2024, picks such a budget by hand from a profile).
"""

from __future__ import annotations

# A prompt always advances by this many tokens a step, target or not: nothing may wait for ever.
LEAST_CHUNK = 8
# Aimed at below the target, for what the fit does not see.
_SHARE = 0.9
# What a step's weight is multiplied by at every later step: about the last 50 count.
_FORGETTING = 0.98


class LatencyTarget:
    """target: seconds; most: the configured budget, never exceeded."""

    def __init__(self, target: float, most: int) -> None:
        self.target = target
        self._most = most
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        x, y = float(num_tokens), seconds
        self._weight = _FORGETTING * self._weight + 1.0
        self._x = _FORGETTING * self._x + x
        self._y = _FORGETTING * self._y + y
        self._xx = _FORGETTING * self._xx + x * x
        self._xy = _FORGETTING * self._xy + x * y

    def budget(self, num_decoding: int) -> int:
        """The most tokens of the next step, of which `num_decoding` are decodes and have their place in any case."""
        least = min(self._most, num_decoding + LEAST_CHUNK)
        if not self._weight:
            return least
        fixed, per_token = self._fit()
        return max(least, min(self._most, int((_SHARE * self.target - fixed) / per_token)))

    def _fit(self) -> tuple[float, float]:
        """(a, b) with a >= 0 and b > 0."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        per_token = (self._xy / self._weight - mean_x * mean_y) / variance if variance > 1.0 else 0.0
        per_token = min(per_token, mean_y / mean_x)  # a is not negative
        if per_token <= 0.0:  # steps of one size, or noise: all of the time is taken to be the tokens'
            per_token = mean_y / mean_x
        return mean_y - per_token * mean_x, per_token
