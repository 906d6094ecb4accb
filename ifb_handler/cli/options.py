"""Command-line options that several commands share: the model and the engine's options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
import yaml

from ifb_handler.cli.errors import UsageError
from ifb_handler.engine.config import EngineConfig

_KEYS = ", ".join(field.name for field in dataclasses.fields(EngineConfig) if field.name != "model")

DEFAULT_MODEL = EngineConfig.model
_ENGINE = "Engine options"

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="smollm2-135m (embedded), a Hugging Face folder, a GGUF file, or a hub id."),
]
Name = Annotated[str | None, typer.Option(help="Name in TorchServe's URLs.", show_default="from the model's name")]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        help="Most requests in the running batch.", show_default=f"{EngineConfig.max_num_seqs}", rich_help_panel=_ENGINE
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(help="Token budget of one step.", show_default="256 on a CPU, 2048 on a GPU", rich_help_panel=_ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and answer together.", show_default="the model's", rich_help_panel=_ENGINE
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, float32, bfloat16 or float16.", show_default="auto", rich_help_panel=_ENGINE),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu, cuda or cuda:N.", show_default="auto", rich_help_panel=_ENGINE),
]
Asynchronous = Annotated[
    bool,
    typer.Option(
        "--async",
        help="Serve by asyncCommunication: gRPC clients may hear each token; hang-ups go unseen.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel=_ENGINE,
        help=f"Any engine option, as in model-config.yaml; may be repeated. Keys: {_KEYS}.",
    ),
]


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """What `--model` and the engine options ask for: `options` hold what differs from the defaults, checked."""

    model: str
    options: dict[str, object]

    @property
    def path(self) -> Path | None:
        """The folder or file that `model` names; None for an embedded name or a hub id."""
        path = Path(self.model).expanduser()
        return path.absolute() if path.exists() else None

    @property
    def handler_options(self) -> dict[str, object]:
        """The keys for `handler:` in model-config.yaml, the weights referenced."""
        where = {"model_path": str(self.path)} if self.path else {"model": self.model}
        return {**where, **self.options}


def choose_model(model: str, settings: list[str] | None, **named: object) -> ModelChoice:
    """Check the options against EngineConfig. UsageError or ConfigError names the option at fault."""
    options = {key: value for key, value in named.items() if value is not None}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UsageError(f"--set: {setting!r} is not KEY=VALUE")
        if key in options:
            raise UsageError(f"--set: {key} is given twice")
        if key == "model":
            raise UsageError("--set: use --model for the model")
        try:
            options[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UsageError(f"--set: {text!r} is not a value that YAML can read") from None
    EngineConfig.from_mapping({**options, "model": model})
    return ModelChoice(model, options)
