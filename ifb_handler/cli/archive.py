"""`ifb archive`: write a model folder or a .mar that any TorchServe with this package serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ifb_handler.cli import options
from ifb_handler.cli.download import check_model, find_model
from ifb_handler.cli.errors import CliError
from ifb_handler.torchserve.archive import ArchiveError, ArchiveFormat, build_archive, default_archive_name


def archive(
    model: options.Model = options.DEFAULT_MODEL,
    name: options.Name = None,
    archive_format: Annotated[
        ArchiveFormat,
        typer.Option("--format", help="A folder that is served as it is, or one .mar file."),
    ] = "no-archive",
    pack_weights: Annotated[
        bool,
        typer.Option("--pack-weights/--reference", help="Copy the weights in, or refer to where they are."),
    ] = False,
    export_path: Annotated[Path, typer.Option(help="The model store to write to; made if it does not exist.")] = Path(
        "model_store"
    ),
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an archive of the same name.")] = False,
    asynchronous: options.Asynchronous = False,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    settings: options.Settings = None,
) -> None:
    """Write a servable archive into a model store.

    The archive holds the handler, a model-config.yaml with every engine option, and, with --pack-weights, the weights.
    Serve it with `ifb serve ARCHIVE`, or with TorchServe's own command line.
    """
    choice = options.choose_model(
        model, settings, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, dtype=dtype, device=device,
    )  # fmt: skip
    if pack_weights:
        weights = find_model(model).path
    else:
        weights = None
        check_model(model)
    try:
        written = build_archive(
            name or default_archive_name(model),
            choice.handler_options,
            export_path,
            archive_format=archive_format,
            weights=weights,
            asynchronous=asynchronous,
            force=force,
        )
    except ArchiveError as error:
        raise CliError(str(error)) from None
    typer.echo(f"Wrote {written}")
    typer.echo(f"Serve it with: ifb serve {written}")
