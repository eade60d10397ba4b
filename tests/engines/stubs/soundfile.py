"""Stands in for soundfile: SGLang's server names it at import, for audio alone."""


def available_formats() -> dict[str, str]:
    """None."""
    return {}
