"""Engines as processes that a fleet reaches over HTTP, and the chaos that befalls them."""
