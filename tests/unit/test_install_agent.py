"""`gc-sidecar install-agent`: what lies in the injected tree, and that a bare interpreter finds it.

The two programs in it are run with every POSIX shell of this machine.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gc_sidecar_agent
from gc_sidecar import install
from gc_sidecar.__main__ import main
from gc_sidecar.install import InstallError, install_agent

VERSION = gc_sidecar_agent.__version__
AGENT_INFO = f"gc_sidecar_agent-{VERSION}.dist-info"
ENDPOINT_INFO = f"gc_sidecar_endpoint-{VERSION}.dist-info"
SHELLS = [
    shell
    for shell in (["sh"], ["dash"], ["bash", "--posix"], ["busybox", "sh"])
    if shutil.which(shell[0])
]

# What a bare interpreter finds: no site-packages, only the tree on PYTHONPATH.
FIND_ENTRY_POINTS = """
import importlib.metadata, json
points = importlib.metadata.entry_points()
print(json.dumps({
    group: {point.name: point.value for point in points.select(group=group)}
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins")
}))
"""

# Every module of the tree is imported; what is loaded then is the tree's or the library's.
IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import gc_sidecar_agent
for module in pkgutil.walk_packages(gc_sidecar_agent.__path__, "gc_sidecar_agent."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
names = {name.split(".")[0] for name in sys.modules}
print(json.dumps(sorted(names - set(sys.stdlib_module_names) - {"__main__", "gc_sidecar_agent"})))
"""


def names_in(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() or path.is_symlink()
    }


def run_bare(directory: Path, code: str) -> str:
    """What `code` prints in an interpreter that has nothing but `directory` and its own library."""
    result = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        env={"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_program(
    shell: list[str], program: str, *arguments: str, env: dict[str, str] | None = None, **rest: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shell, program, *arguments],
        env={"PATH": os.environ["PATH"], **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        cwd=rest.get("cwd"),
    )


# --- the tree ---


def test_vllm_finds_the_plugin_and_not_the_endpoint(tmp_path: Path) -> None:
    install_agent(tmp_path / "agent")
    assert json.loads(run_bare(tmp_path / "agent", FIND_ENTRY_POINTS)) == {
        "vllm.general_plugins": {"gc_sidecar": "gc_sidecar_agent.plugin:register"},
        "vllm.endpoint_plugins": {},
    }


def test_vllm_finds_the_endpoint_where_it_was_asked_for(tmp_path: Path) -> None:
    install_agent(tmp_path / "agent", endpoint_plugin=True)
    assert json.loads(run_bare(tmp_path / "agent", FIND_ENTRY_POINTS)) == {
        "vllm.general_plugins": {"gc_sidecar": "gc_sidecar_agent.plugin:register"},
        "vllm.endpoint_plugins": {"gc_sidecar": "gc_sidecar_agent.endpoint:GcEndpointPlugin"},
    }


def test_the_entry_points_name_what_is_in_the_tree(tmp_path: Path) -> None:
    install_agent(tmp_path, endpoint_plugin=True)
    code = (
        "import importlib.metadata as m;"
        "points = [p for g in ('vllm.general_plugins', 'vllm.endpoint_plugins')"
        " for p in m.entry_points(group=g)];"
        "print(*sorted(p.load().__name__ for p in points))"
    )
    assert run_bare(tmp_path, code).split() == ["GcEndpointPlugin", "register"]


def test_the_tree_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    install_agent(tmp_path, endpoint_plugin=True)
    assert json.loads(run_bare(tmp_path, IMPORT_EVERYTHING)) == []


def test_no_byte_code_and_no_tests_travel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("__init__.py", "a.py", "sub/b.py", "py.typed", "tests/test_a.py", "notes.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "a.cpython-311.pyc").touch()
    modules = {name for name in install.tree(source, "1", False) if name.startswith("gc_sidecar")}
    assert {name for name in modules if ".dist-info/" not in name} == {
        "gc_sidecar_agent/__init__.py",
        "gc_sidecar_agent/a.py",
        "gc_sidecar_agent/sub/b.py",
        "gc_sidecar_agent/py.typed",
    }


def test_the_record_lists_every_file_with_its_hash(tmp_path: Path) -> None:
    install_agent(tmp_path, endpoint_plugin=True)
    listed: set[str] = set()
    for info in (AGENT_INFO, ENDPOINT_INFO):
        for name, digest, size in csv.reader((tmp_path / info / "RECORD").open()):
            listed.add(name)
            if digest:
                content = (tmp_path / name).read_bytes()
                encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
                assert digest == f"sha256={encoded.decode().rstrip('=')}"
                assert int(size) == len(content)
    assert listed == names_in(tmp_path)


def test_the_distribution_has_a_name_and_a_version(tmp_path: Path) -> None:
    install_agent(tmp_path)
    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (distribution.name, distribution.version) == ("gc-sidecar-agent", VERSION)


def test_an_entry_point_comes_after_what_it_names(tmp_path: Path) -> None:
    names = list(install.tree(Path(gc_sidecar_agent.__file__).parent, VERSION, True))
    modules = [i for i, name in enumerate(names) if name.startswith("gc_sidecar_agent/")]
    entry_points = [i for i, name in enumerate(names) if name.endswith("entry_points.txt")]
    assert max(modules) < min(entry_points)


def test_everybody_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        install_agent(tmp_path / "deep" / "agent")
    finally:
        os.umask(before)
    for path in [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]:
        program = path.is_dir() or path.parent.name == "bin"
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if program else 0o644), path


# --- again ---


def test_done_again_it_writes_nothing(tmp_path: Path) -> None:
    first = install_agent(tmp_path, endpoint_plugin=True)
    assert set(first.written) == names_in(tmp_path)
    inodes = {name: (tmp_path / name).stat().st_ino for name in first.written}
    again = install_agent(tmp_path, endpoint_plugin=True)
    assert (again.written, again.removed) == ([], [])
    assert {name: (tmp_path / name).stat().st_ino for name in first.written} == inodes


def test_byte_code_of_an_engine_that_runs_stays(tmp_path: Path) -> None:
    install_agent(tmp_path)
    byte_code = tmp_path / "gc_sidecar_agent" / "__pycache__" / "page.cpython-311.pyc"
    byte_code.parent.mkdir()
    byte_code.touch()
    assert install_agent(tmp_path).removed == []
    assert byte_code.exists()


def test_a_damaged_file_is_mended_without_a_moment_in_between(tmp_path: Path) -> None:
    install_agent(tmp_path)
    page = tmp_path / "gc_sidecar_agent" / "page.py"
    content = page.read_text()
    page.write_text("damaged")
    with page.open() as reader:
        assert install_agent(tmp_path).written == ["gc_sidecar_agent/page.py"]
        # Who had it open reads on in what was there.
        assert reader.read() == "damaged"
    assert page.read_text() == content


def test_the_endpoint_goes_when_it_is_not_asked_for_any_more(tmp_path: Path) -> None:
    install_agent(tmp_path, endpoint_plugin=True)
    done = install_agent(tmp_path)
    assert not (tmp_path / ENDPOINT_INFO).exists()
    assert all(name.startswith(f"{ENDPOINT_INFO}/") for name in done.removed)
    assert (tmp_path / AGENT_INFO / "entry_points.txt").exists()


def test_what_an_older_version_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "gc_sidecar_agent" / "old"
    old.mkdir(parents=True)
    (old / "module.py").touch()
    (old / "__pycache__").mkdir()
    (old / "__pycache__" / "module.cpython-311.pyc").touch()
    info = tmp_path / "gc_sidecar_agent-0.0.1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("gc_sidecar_agent/old/module.py,,\n")
    (info / "entry_points.txt").touch()
    install_agent(tmp_path)
    assert not old.exists()
    assert not info.exists()
    names = importlib.metadata.distributions(path=[str(tmp_path)])
    assert [distribution.version for distribution in names] == [VERSION]


def test_foreign_files_stay(tmp_path: Path) -> None:
    foreign = [
        tmp_path / "sitecustomize.py",
        tmp_path / "bin" / "mine",
        tmp_path / "other-1.0.dist-info" / "METADATA",
        tmp_path / "gc_sidecar_agent" / "notes.txt",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    install_agent(tmp_path, endpoint_plugin=True)
    install_agent(tmp_path)
    assert all(path.read_text() == "mine" for path in foreign)


def test_a_record_that_names_foreign_files_removes_none(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    (tmp_path / "agent" / "mine").mkdir(parents=True)
    (tmp_path / "agent" / "mine" / "file").touch()
    info = tmp_path / "agent" / "gc_sidecar_agent-0.0.1.dist-info"
    info.mkdir()
    rows = ["../victim", str(victim), "gc_sidecar_agent/../mine/file", "mine/file", ""]
    rows += [".", "gc_sidecar_agent/link/victim", "gc_sidecar_agent/\0"]
    (info / "RECORD").write_text("".join(f"{row},,\n" for row in rows))
    (tmp_path / "agent" / "gc_sidecar_agent").mkdir()
    (tmp_path / "agent" / "gc_sidecar_agent" / "link").symlink_to(tmp_path)
    install_agent(tmp_path / "agent")
    assert victim.exists()
    assert (tmp_path / "agent" / "mine" / "file").exists()


# --- where it cannot be ---


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InstallError, match="is not a directory"):
        install_agent(tmp_path / "file")
    with pytest.raises(InstallError, match="cannot write"):
        install_agent(tmp_path / "file" / "agent")


def test_a_directory_that_cannot_be_written_is_named() -> None:
    with pytest.raises(InstallError, match="cannot write /proc"):
        install_agent(Path("/proc/self/agent"))


def test_a_path_that_python_would_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="PYTHONPATH"):
        install_agent(tmp_path / "a:b")


def test_our_own_source_is_refused() -> None:
    with pytest.raises(InstallError, match="runs from"):
        install_agent(Path(gc_sidecar_agent.__file__).parents[1])


@pytest.mark.parametrize("name", ["gc_sidecar_agent", "gc_sidecar_agent/commands", "bin"])
def test_nothing_is_written_through_a_symbolic_link(name: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "agent" / name).parent.mkdir(parents=True)
    (tmp_path / "agent" / name).symlink_to(elsewhere)
    with pytest.raises(InstallError, match="symbolic link"):
        install_agent(tmp_path / "agent")
    assert list(elsewhere.iterdir()) == []


# --- with-agent ---


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    install_agent(tmp_path / "an agent")
    return tmp_path / "an agent"


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize(
    ("before", "after"), [(None, ""), ("", ""), ("/image", ":/image"), ("/a:/b c", ":/a:/b c")]
)
def test_with_agent_comes_before_what_the_image_has(
    shell: list[str], before: str | None, after: str, agent: Path
) -> None:
    env = {} if before is None else {"PYTHONPATH": before}
    program = str(agent / "bin" / "with-agent")
    result = run_program(shell, program, "printenv", "PYTHONPATH", env=env)
    assert result.stdout == f"{agent}{after}\n", result.stderr


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_with_agent_is_found_through_links_and_from_anywhere(
    shell: list[str], agent: Path, tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to("../links/second")
    (tmp_path / "links" / "second").symlink_to(agent / "bin" / "with-agent")
    (agent / "bin" / "near").symlink_to("with-agent")
    places = [
        (str(tmp_path / "links" / "first"), "/"),
        ("links/first", str(tmp_path)),
        ("first", str(tmp_path / "links")),
        ("./near", str(agent / "bin")),
        ("with-agent", str(agent / "bin")),
    ]
    for program, cwd in places:
        result = run_program(
            shell, program, "printenv", "PYTHONPATH", env={"CDPATH": "/usr"}, cwd=cwd
        )
        assert result.stdout == f"{agent}\n", (program, result.stderr)


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_with_agent_becomes_the_command_with_its_arguments_and_its_end(
    shell: list[str], agent: Path
) -> None:
    program = str(agent / "bin" / "with-agent")
    result = run_program(shell, program, "printf", "[%s]", "a b", "", "$HOME", "*")
    assert result.stdout == "[a b][][$HOME][*]"
    assert run_program(shell, program, "sh", "-c", "exit 42").returncode == 42
    assert run_program(shell, program, "no-such-command").returncode == 127
    pid = run_program(["sh", "-c", 'echo $$; exec "$0" "$@"'], program, "sh", "-c", "echo $$")
    assert len(set(pid.stdout.split())) == 1, "exec, for signals must reach the engine"


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_with_agent_alone_says_how_it_is_used(shell: list[str], agent: Path) -> None:
    result = run_program(shell, str(agent / "bin" / "with-agent"))
    assert result.returncode == 2
    assert result.stderr.startswith("usage: with-agent COMMAND")


def test_with_agent_makes_the_plugin_visible_to_the_command(agent: Path) -> None:
    find = [sys.executable, "-S", "-c", FIND_ENTRY_POINTS]
    result = run_program([], str(agent / "bin" / "with-agent"), *find)
    assert "gc_sidecar_agent.plugin:register" in result.stdout


# --- the client in the tree ---


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_client_of_the_tree_runs_with_the_python_of_the_image(
    shell: list[str], agent: Path, tmp_path: Path
) -> None:
    # What lies in the user's own folder must not be taken for the library's.
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    program = str(agent / "bin" / "gc-sidecar")
    env = {"GC_SIDECAR_PYTHON": sys.executable}
    result = run_program(shell, program, "--version", env=env, cwd=str(tmp_path))
    assert result.stdout == f"gc-sidecar {VERSION}\n", result.stderr
    result = run_program(shell, program, "status", "--url", "http://127.0.0.1:1", env=env)
    assert result.returncode == 3, result.stderr


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_client_of_the_tree_says_when_there_is_no_python(shell: list[str], agent: Path) -> None:
    env = {"GC_SIDECAR_PYTHON": "no-such-python"}
    result = run_program(shell, str(agent / "bin" / "gc-sidecar"), "status", env=env)
    assert result.returncode == 127
    assert "no no-such-python here; set GC_SIDECAR_PYTHON" in result.stderr


def test_the_client_of_the_tree_keeps_its_path_to_itself(agent: Path) -> None:
    text = (agent / "bin" / "gc-sidecar").read_text()
    assert "PYTHONPATH=" not in text
    assert "export" not in text


# --- the command ---


def test_the_command_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-agent", str(tmp_path), "--endpoint-plugin"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/bin/with-agent vllm serve MODEL" in out
    assert "GC_SIDECAR_RUN_DIR=" in out
    assert "VLLM_PLUGINS=gc_sidecar,lora_filesystem_resolver,lora_hf_hub_resolver" in out


def test_the_command_without_the_endpoint_asks_for_no_vllm_plugins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-agent", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "VLLM_PLUGINS=" not in out
    assert re.search("transport|run directory", out)


def test_the_command_says_that_the_endpoint_plugin_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "endpoint plugin removed"
    assert main(["install-agent", str(tmp_path), "--endpoint-plugin"]) == 0
    assert said not in capsys.readouterr().out
    assert main(["install-agent", str(tmp_path)]) == 0
    assert said in capsys.readouterr().out
    assert main(["install-agent", str(tmp_path)]) == 0
    assert said not in capsys.readouterr().out


def test_the_command_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install-agent", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["directory"] == str(tmp_path)
    assert document["version"] == VERSION
    assert set(document["written"]) == names_in(tmp_path)
    assert document["environment"]["PYTHONPATH"] == str(tmp_path)


def test_the_command_fails_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["install-agent", str(tmp_path / "file")]) == 1
    assert f"{tmp_path / 'file'} is not a directory" in capsys.readouterr().err


def test_a_relative_directory_is_told_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["install-agent", "agent"]) == 0
    assert f"{tmp_path}/agent/bin/with-agent" in capsys.readouterr().out
