"""`deltasync apply`: a checkpoint and a patch file make a new checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltasync.cli.terminal import file_argument, phases, print_written


def apply(
    patch: Annotated[Path, file_argument("PATCH")],
    checkpoint: Annotated[Path, file_argument("CHECKPOINT")],
    out: Annotated[Path, typer.Option(help="The new file or folder.", show_default=False)],
) -> None:
    """Apply PATCH to CHECKPOINT, and write what it was made from.

    CHECKPOINT is a safetensors file, or a folder of them: then its other files are copied too.
    Whether it is what the patch fits on is checked first, and what was written at the end.
    """
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.files.output import refuse_existing
    from deltasync.files.patch_file import PatchFile, apply_patch_file

    refuse_existing(out)
    file, base = PatchFile(patch), Checkpoint(checkpoint)
    with phases(base.num_bytes) as phase:
        digest = apply_patch_file(file, base, out, phase=phase)
    print_written(out, base.num_bytes, len(base.specs), digest)
