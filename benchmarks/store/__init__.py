"""Versions through an object store over a slow link: from the trainer's step to the engine."""
