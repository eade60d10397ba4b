"""Options of the commands that work on a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from deltasync.store.objects import StoreOptions

StoreUrl: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="URL", show_default=False, help="A folder, s3://bucket/prefix, ..."),
]
Config: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="KEY=VALUE",
        help="An option of the object store, such as endpoint=http://host:9000; repeatable.",
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None, typer.Option("--key-file", help="File with the key that signs manifests.")
]


def store_options(config: list[str] | None, key_file: Path | None) -> StoreOptions:
    """Parse the options with these names. Raises BadParameter, ConfigError."""
    from deltasync.config import read_secret
    from deltasync.store.objects import StoreOptions

    pairs = [text.partition("=") for text in config or ()]
    for name, sign, _ in pairs:
        if not sign:
            raise typer.BadParameter(f"{name!r} is not like KEY=VALUE", param_hint="--config")
    key = None if key_file is None else read_secret(key_file)
    return StoreOptions.model_validate({"config": {k: v for k, _, v in pairs}, "mac_key": key})
