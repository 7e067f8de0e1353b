"""Plays a pod through with podman, as the kubelet would: from its spec, with its command lines, mounts, users and
security contexts.

What is played: init containers in their order, native sidecars kept and waited for by their startup probe, the
main container, and the end: sidecars in reverse order, by SIGTERM. All share one network namespace, which has a
loopback and nothing else. What is not: scheduling, restarts, GPUs, and every probe but that one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.image.containers import PODMAN, RUN, podman
from tests.sidecar_process import wait_for


@dataclass(frozen=True)
class Ended:
    """How a container ended, and how long that took from the moment it was asked to."""

    name: str
    exit_code: int
    took_s: float


class PlayedPod:
    """`with PlayedPod(spec, images, ...) as pod:` has run the init containers, and its sidecars run."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        images: Mapping[str, str],
        programs: Mapping[str, Path] | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`images` by container; `programs` are files of ours to have in /usr/local/bin, in each of them."""
        self._spec = spec
        self._images = images
        self._programs = programs or {}
        self._environment = environment or {}
        self._containers = {c["name"]: c for c in [*spec["initContainers"], *spec["containers"]]}
        # Memory, as the run directory's volume is.
        self._directory = Path(tempfile.mkdtemp(prefix="gc-sidecar-pod-", dir="/dev/shm"))
        self._directory.chmod(0o755)
        self._name = self._directory.name
        self.sidecars = [
            c["name"] for c in spec["initContainers"] if c.get("restartPolicy") == "Always"
        ]

    def __enter__(self) -> PlayedPod:
        try:
            self._make_volumes()
            self._start_network()
            for container in self._spec["initContainers"]:
                name = container["name"]
                self.start(name)
                if name in self.sidecars:
                    self._wait_for_startup(container)
                else:
                    code = self.wait(name)
                    assert code == 0, f"{name} ended with {code}:\n{self.logs(name)}"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        names = [self._id(name) for name in self._containers]
        podman("rm", "--force", "--ignore", "--time", "0", *names, check=False)
        # Last, for the others live in its network.
        podman("rm", "--force", "--ignore", "--time", "0", self._id("network"), check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- what the kubelet does ---

    def start(self, name: str, **environment: str) -> None:
        """Start a container; one of that name that has ended makes place for it."""
        podman("rm", "--force", "--ignore", "--time", "0", self._id(name))
        message = self._directory / f"{name}.termination-log"
        message.write_bytes(b"")
        message.chmod(0o666)
        container = self._containers[name]
        command = container.get("command")
        podman(
            *RUN, "--detach", "--name", self._id(name), "--no-healthcheck",
            "--network", f"container:{self._id('network')}",
            *self._security(container), *self._resources(container),
            *self._mounts(container), "--volume", f"{message}:/dev/termination-log",
            *self._variables(container, environment),
            *(["--workdir", container["workingDir"]] if "workingDir" in container else []),
            *(["--entrypoint", json.dumps(command)] if command else []),
            self._images[name], *map(str, container.get("args", [])),
        )  # fmt: skip

    def wait(self, name: str, timeout_s: float = 90.0) -> int:
        """The exit code of a container, once it has ended."""
        return int(podman("wait", self._id(name), timeout_s=timeout_s))

    def end(self) -> list[Ended]:
        """End the sidecars as the kubelet does when the main container has ended: the last first, by SIGTERM."""
        ended = []
        for name in reversed(self.sidecars):
            began_s = time.monotonic()
            podman("stop", "--time", "30", self._id(name))
            ended.append(Ended(name, self.wait(name), time.monotonic() - began_s))
        return ended

    # --- what one sees of it ---

    def signal(self, name: str, number: str) -> None:
        """Send a signal to the first process of a container."""
        podman("kill", "--signal", number, self._id(name))

    def logs(self, name: str) -> str:
        """Everything that a container wrote, on both streams."""
        done = subprocess.run(
            [*PODMAN, "logs", self._id(name)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def is_running(self, name: str) -> bool:
        """Whether a container runs."""
        state = podman("container", "inspect", "--format", "{{.State.Running}}", self._id(name))
        return state.strip() == "true"

    def execute(self, name: str, *command: str, check: bool = True) -> str:
        """What a command prints in a container, as `kubectl exec` runs it."""
        return podman("exec", self._id(name), *command, check=check)

    def termination_message(self, name: str) -> str:
        """What a container left for the pod's status."""
        return (self._directory / f"{name}.termination-log").read_text()

    def volume(self, name: str) -> Path:
        """Where a volume lies on this machine."""
        return self._directory / "volumes" / name

    # --- from the spec to podman's flags ---

    def _id(self, name: str) -> str:
        return f"{self._name}-{name}"

    def _make_volumes(self) -> None:
        """As the kubelet makes an emptyDir of a pod with an fsGroup: open to all, setgid, with that group."""
        group = self._spec["securityContext"]["fsGroup"]
        for volume in self._spec["volumes"]:
            assert "emptyDir" in volume, f"not played here: {volume}"
            path = self.volume(volume["name"])
            path.mkdir(parents=True)
            os.chown(path, 0, group)
            path.chmod(0o2777)

    def _start_network(self) -> None:
        # It holds the namespace that the others share, as a pod's own container does.
        pause = "import signal; signal.pause()"
        podman(
            *RUN, "--detach", "--name", self._id("network"), "--no-healthcheck", 
            "--network", "none", "--entrypoint", '["python3", "-c"]', next(iter(self._images.values())), pause,
        )  # fmt: skip

    def _wait_for_startup(self, container: Mapping[str, Any]) -> None:
        if "startupProbe" not in container:
            return
        name, probe = container["name"], container["startupProbe"]["httpGet"]
        port = next(p["containerPort"] for p in container["ports"] if p["name"] == probe["port"])
        asked = f"http://127.0.0.1:{port}{probe['path']}"
        ask = f"import urllib.request; urllib.request.urlopen({asked!r}, timeout=5)"

        def is_up() -> bool:
            assert self.is_running(name), f"{name} ended at once:\n{self.logs(name)}"
            command = [*PODMAN, "exec", self._id(name), "python3", "-c", ask]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        wait_for(f"{name} answers {asked}", is_up, 30.0)

    def _security(self, container: Mapping[str, Any]) -> list[str]:
        pod, own = self._spec["securityContext"], container.get("securityContext", {})
        flags = ["--group-add", str(pod["fsGroup"])]
        if "runAsUser" in own:
            flags += ["--user", f"{own['runAsUser']}:{own['runAsGroup']}"]
        if own.get("readOnlyRootFilesystem"):
            # podman would give /tmp and others a file system in memory, which Kubernetes does not.
            flags += ["--read-only", "--read-only-tmpfs=false"]
        flags += [f"--cap-drop={name}" for name in own.get("capabilities", {}).get("drop", [])]
        if own.get("allowPrivilegeEscalation") is False:
            flags += ["--security-opt=no-new-privileges"]
        # RuntimeDefault is what podman does unless told otherwise.
        profile = own.get("seccompProfile", pod.get("seccompProfile", {"type": "Unconfined"}))
        if profile["type"] == "Unconfined":
            flags += ["--security-opt=seccomp=unconfined"]
        return flags

    def _resources(self, container: Mapping[str, Any]) -> list[str]:
        limits = container["resources"]["limits"]
        cores = str(limits["cpu"])
        cpus = float(cores[:-1]) / 1000 if cores.endswith("m") else float(cores)
        memory = limits["memory"].replace("Mi", "m").replace("Gi", "g")
        return ["--cpus", str(min(cpus, os.cpu_count() or 1)), "--memory", memory]

    def _mounts(self, container: Mapping[str, Any]) -> list[str]:
        mounts = [
            f"{self.volume(m['name'])}:{m['mountPath']}:{'ro' if m.get('readOnly') else 'rw'}"
            for m in container["volumeMounts"]
        ]
        mounts += [f"{path}:/usr/local/bin/{name}:ro" for name, path in self._programs.items()]
        return [flag for mount in mounts for flag in ("--volume", mount)]

    def _variables(self, container: Mapping[str, Any], more: Mapping[str, str]) -> Sequence[str]:
        given = {
            variable["name"]: variable.get("value", "of-the-cluster")
            for variable in container.get("env", [])
            if not variable.get("valueFrom", {}).get("secretKeyRef", {}).get("optional")
        }
        given |= {**self._environment.get(container["name"], {}), **more}
        return [flag for name, value in given.items() for flag in ("--env", f"{name}={value}")]
