"""Imported before any test module, and so before torch: the package's own settings of the environment come first."""

import ifb_handler  # noqa: F401
