"""Write digests of what engines make of some matrices: forms.json.

Run `python -m tests.quant.golden.forms` in the environment of `make engines`. Digests are of bits,
with one NaN for all.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from tests.engines import quantizers
from tests.quant.kinds import FINITE, KINDS, cases, digest

FILE = Path(__file__).with_suffix(".json")


def main() -> None:
    forms: dict[str, object] = {}
    for quantizer in quantizers.installed():
        name = quantizer.form.name
        if name in forms:
            continue
        package = quantizer.package
        made = {
            case: {suffix: digest(part) for suffix, part in quantizer.quantize(weight).items()}
            for case, weight in cases(FINITE if quantizer.finite else KINDS)
        }
        forms[name] = {"package": package, "version": version(package), "cases": made}
    inputs = {case: digest(weight) for case, weight in cases(KINDS)}
    FILE.write_text(json.dumps({"inputs": inputs, "forms": forms}, indent=1) + "\n")


if __name__ == "__main__":
    main()
