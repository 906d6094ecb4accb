"""What a step takes by its tokens: seconds = a + b * tokens, by least squares, the recent steps weighing most.

So whoever decides by it follows the machine, its load and the length of the contexts.
"""

from __future__ import annotations

# What a step's weight is multiplied by at every later step: about the last 50 count.
_FORGETTING = 0.98
# A step that takes this much longer than the mean is an accident: it counts as one that takes just so much.
_MOST_OVER_MEAN = 4.0


class StepTime:
    """The weighted moments of (tokens, seconds)."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        x, y = float(num_tokens), seconds
        if self.is_known:
            y = min(y, _MOST_OVER_MEAN * max(1.0, x * self._weight / self._x) * self._y / self._weight)
        self._weight = _FORGETTING * self._weight + 1.0
        self._x = _FORGETTING * self._x + x
        self._y = _FORGETTING * self._y + y
        self._xx = _FORGETTING * self._xx + x * x
        self._xy = _FORGETTING * self._xy + x * y

    def fit(self, ridge: float = 0.0) -> tuple[float, float]:
        """(a, b), neither negative, once a step is known.

        ridge    added to the variance of the tokens: the less they vary, the smaller a slope is believed
        """
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x + ridge
        per_token = (self._xy / self._weight - mean_x * mean_y) / variance if variance > 0.0 else 0.0
        per_token = min(max(0.0, per_token), mean_y / mean_x)
        return mean_y - per_token * mean_x, per_token

    def estimate(self, num_tokens: int) -> float:
        """Seconds that a step of `num_tokens` will take; 0 while no step is known."""
        if not self.is_known:
            return 0.0
        fixed, per_token = self.fit()
        return fixed + per_token * num_tokens

    @property
    def variance(self) -> float:
        """Of the number of tokens."""
        mean = self._x / self._weight
        return self._xx / self._weight - mean * mean

    @property
    def seconds_per_token(self) -> float:
        """As if all of a step's time were its tokens'."""
        return self._y / self._x
