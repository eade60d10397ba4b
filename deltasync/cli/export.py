"""`deltasync export`: a version as a checkpoint that restores a trainer."""

from __future__ import annotations

from deltasync.cli.fetch import Out, To, write
from deltasync.cli.stores import Config, KeyFile, RunName, StoreUrl, store_options
from deltasync.cli.terminal import AsJson


def export(
    url: StoreUrl,
    out: Out,
    to: To = None,
    run: RunName = None,
    config: Config = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a version of a store as a checkpoint that a trainer can be restored from.

    Its tensors are bit for bit what the trainer had, in the dtypes that it sent.
    """
    write(url, out, to, None, run, options=store_options(config, key_file), as_json=as_json)
