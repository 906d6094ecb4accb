"""The most tokens a step may have so that running answers keep a target inter-token latency (`target_itl_ms`).

The budget follows what steps take (`step_time.py`). The rest of it that decodes leave goes to prompts, as ever
(Sarathi-Serve, OSDI 2024, picks such a budget by hand from a profile).
"""

from __future__ import annotations

from ifb_handler.engine.step_time import StepTime

# A prompt always advances by this many tokens a step, target or not: nothing may wait for ever.
LEAST_CHUNK = 8
# Aimed at below the target, for what the fit does not see.
_SHARE = 0.9


class LatencyTarget:
    """target: seconds; most: the configured budget, never exceeded."""

    def __init__(self, target: float, most: int) -> None:
        self.target = target
        self._most = most
        self._time = StepTime()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        self._time.observe(num_tokens, seconds)

    def budget(self, num_decoding: int) -> int:
        """The most tokens of the next step, of which `num_decoding` are decodes and have their place in any case."""
        least = min(self._most, num_decoding + LEAST_CHUNK)
        if not self._time.is_known:
            return least
        fixed, per_token = self._time.fit()
        if per_token <= 0.0 or self._time.variance <= 1.0:
            # Steps of one size, or noise: all of the time is taken to be the tokens'.
            fixed, per_token = 0.0, self._time.seconds_per_token
        return max(least, min(self._most, int((_SHARE * self.target - fixed) / per_token)))
