"""How a long download or load tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

# progress(done, total, what): `done` of `total` bytes or tensors of `what`; total is 0 where it is not known.
Progress = Callable[[int, int, str], None]
