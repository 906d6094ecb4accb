"""What goes wrong with a model before it runs, in words that say what to do."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be found, read or served: names what is at fault and what would be accepted."""
