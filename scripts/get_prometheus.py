"""Put `prometheus` and `promtool` into .venv/tools, for the tests that hold our rules against the real ones.

Tests import `find_prometheus`, which only looks; run as a program it fetches what is missing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / ".venv" / "tools"
PROGRAMS = ("prometheus", "promtool")
DIRECTORY_VARIABLE = "GC_SIDECAR_PROMETHEUS_DIR"
APT_HELPER = Path("/usr/lib/apt/apt-helper")


# Of Debian's pool, as its signed index lists them. They run on any glibc from 2.34 on.
POOL = "pool/main/p/prometheus"
VERSION = "3.5.3+ds1-6"
SHA256 = {
    "amd64": {
        "prometheus": "593bcced02d8082688ea034dfc543848ad145c5f793aae5aad756c4dbdfa98da",
        "promtool": "1fb8bad7b932e7a44bccb12517f0bd96d5d5d83f15d3a1c0e2aa705cbf93fe90",
    },
    "arm64": {
        "prometheus": "1ee56de93c47df84ba1c1e3c88479db19455db5d99ee59f6bedc7b48f5d120a4",
        "promtool": "92945d09e49f4db89d7d701876be9b56ee21f0e702d9e710f4a61877546207c8",
    },
}


class NotHad(Exception):
    """One way did not lead there; the message says why."""


def has_both(directory: Path) -> bool:
    """Whether `directory` holds both programs."""
    return all(os.access(directory / name, os.X_OK) for name in PROGRAMS)


def find_prometheus(environ: Mapping[str, str] = os.environ, tools: Path = TOOLS) -> Path | None:
    """The directory that holds both programs, or None: the one that the variable names and no other, else
    .venv/tools, else one on PATH. Asks no network."""
    named = environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named).resolve() if has_both(Path(named)) else None
    on_path = [Path(entry) for entry in environ.get("PATH", "").split(os.pathsep) if entry]
    return next((place for place in (tools, *on_path) if has_both(place)), None)


def output_of(command: list[str], directory: Path | None = None) -> str:
    """What `command` prints; NotHad when it fails or is not there."""
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotHad(f"{command[0]}: {error.strerror}") from error
    if result.returncode != 0:
        last = (result.stderr or result.stdout).strip().splitlines()[-1:]
        raise NotHad(f"{Path(command[0]).name} {command[1]}: {' '.join(last) or 'failed'}")
    return result.stdout


def debian_mirrors() -> list[str]:
    """The archives that this machine's apt is set to, in its order and whatever the format of its files."""
    lists = output_of(["apt-get", "--print-uris", "update"])
    return list(dict.fromkeys(re.findall(r"^'(\S+?)/dists/", lists, re.MULTILINE)))


def fetch_pinned(scratch: Path) -> None:
    """The pinned 3.x from the pool, by apt's own downloader, which knows this machine's proxies."""
    architecture = output_of(["dpkg", "--print-architecture"]).strip()
    if architecture not in SHA256:
        raise NotHad(f"no package is pinned for {architecture}")
    mirrors = debian_mirrors()
    if not mirrors:
        raise NotHad("apt has no sources")
    for program, checksum in SHA256[architecture].items():
        name = f"{program}_{VERSION}_{architecture}.deb"
        failures = []
        for mirror in mirrors:
            url, target = f"{mirror}/{POOL}/{name}", str(scratch / name)
            try:
                output_of([str(APT_HELPER), "download-file", url, target, f"SHA256:{checksum}"])
                break
            except NotHad as failure:
                failures.append(str(failure))
        else:
            raise NotHad(f"{name} is on no mirror of apt's sources ({failures[0]})")


def fetch_own_release(scratch: Path) -> None:
    """What the machine's own release has, its signature checked by apt. Older releases have both programs in
    one package."""
    try:
        output_of(["apt-get", "download", *PROGRAMS], scratch)
    except NotHad:
        output_of(["apt-get", "download", PROGRAMS[0]], scratch)


def extract(scratch: Path) -> None:
    """Move both programs out of the packages in `scratch` into .venv/tools."""
    root = scratch / "root"
    packages = sorted(scratch.glob("*.deb"))
    for package in packages:
        output_of(["dpkg-deb", "--extract", str(package), str(root)])
    if not has_both(root / "usr" / "bin"):
        raise NotHad(f"{', '.join(p.name for p in packages)}: lacks one of {', '.join(PROGRAMS)}")
    for name in PROGRAMS:
        # Within one file system, so that nobody ever sees half a program.
        os.replace(root / "usr" / "bin" / name, TOOLS / name)


def get_prometheus() -> list[str]:
    """Fill .venv/tools by the first way that works. Returns why each way before it did not."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    ways = (
        (f"Prometheus {VERSION} of Debian", fetch_pinned),
        ("this machine's own release", fetch_own_release),
    )
    for name, fetch in ways:
        with tempfile.TemporaryDirectory(dir=TOOLS) as scratch:
            try:
                fetch(Path(scratch))
                extract(Path(scratch))
                break
            except NotHad as failure:
                failures.append(f"{name}: {failure}")
    return failures


def main() -> None:
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named and not has_both(Path(named)):
        sys.exit(f"{DIRECTORY_VARIABLE}={named}: it does not hold both {' and '.join(PROGRAMS)}")
    if not named and not has_both(TOOLS):
        for failure in get_prometheus():
            print(f"    passed over {failure}", file=sys.stderr)
    directory = find_prometheus()  # on PATH perhaps, where nothing could be fetched
    if directory is None:
        sys.exit(
            "Prometheus could not be had, and PATH does not have it.\n"
            "Install Prometheus 2.42 or later with its promtool (on Debian: apt-get install prometheus), or\n"
            f"set {DIRECTORY_VARIABLE} to a directory that holds both programs."
        )
    version = output_of([str(directory / "promtool"), "--version"]).splitlines()[0]
    print(f"==> {version.partition(' (')[0]} and prometheus are in {directory}")


if __name__ == "__main__":
    main()
