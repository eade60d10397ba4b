"""Stands in for SGLang's kernels, whose builds want CUDA. On a CPU without AMX none is called."""


def __getattr__(name: str):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_args, **_options):
        raise NotImplementedError(name)

    return absent
