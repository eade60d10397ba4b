"""Write digests of what engines make of some matrices: forms.json.

Run `python -m tests.quant.golden.forms fp8.py COMMIT`.

It runs in the environment of `make engines`. fp8.py is of NeMo-RL at that commit, where it is
nemo_rl/models/generation/vllm/quantization/fp8.py. Digests are of bits, with one NaN for all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from deltasync.quant.block_fp8 import BlockFp8
from tests.engines import quantizers
from tests.engines.quantizers import Quantizer
from tests.quant.kinds import FINITE, KINDS, cases, digest

FILE = Path(__file__).with_suffix(".json")


def main(nemo_rl: Path, commit: str) -> None:
    forms: dict[str, object] = {}
    for quantizer in (*quantizers.installed(), *_of_nemo_rl(nemo_rl)):
        name = quantizer.form.name
        if name in forms:
            continue
        package = quantizer.package
        made = {
            case: {suffix: digest(part) for suffix, part in quantizer.quantize(weight).items()}
            for case, weight in cases(FINITE if quantizer.finite else KINDS)
        }
        source = commit if package == "nemo-rl" else version(package)
        forms[name] = {"package": package, "version": source, "cases": made}
    inputs = {case: digest(weight) for case, weight in cases(KINDS)}
    FILE.write_text(json.dumps({"inputs": inputs, "forms": forms}, indent=1) + "\n")


def _of_nemo_rl(path: Path) -> Iterator[Quantizer]:
    for form in (BlockFp8("float32", "nemo-rl"), BlockFp8("ue8m0", "nemo-rl")):
        quantize = quantizers.nemo_rl(path, ue8m0=form.scale == "ue8m0")
        yield Quantizer("nemo-rl", form, quantize)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
