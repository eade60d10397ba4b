"""Lets failures of the shipped contract show the values they compared."""

import pytest

pytest.register_assert_rewrite("deltasync.testing.transport", "deltasync.testing.links")
