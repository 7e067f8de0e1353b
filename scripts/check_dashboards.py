"""Holds the Grafana dashboards against the types of the oldest and of the newest Grafana that we claim.

There is no Grafana in our tests. What comes closest is its npm package @grafana/schema: each part of a dashboard
becomes a TypeScript literal with the type that Grafana has for it, and the compiler finds a misspelt option or a
value of the wrong kind. Run it as `.venv/bin/python scripts/check_dashboards.py [FILE...]`; it needs node and npm.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = ROOT / "deploy" / "grafana"
TOOLS = ROOT / ".venv" / "tools" / "grafana-schema"
# How a panel's type in the dashboard is called in the package, where that differs.
COMPOSABLES = {"state-timeline": "statetimeline"}


@dataclass(frozen=True)
class Package:
    path: str
    """Below node_modules."""
    version: str
    integrity: str
    name: str | None = None
    """Where the path is an alias."""


@dataclass(frozen=True)
class Schema:
    package: Package
    types: str
    """The directory of its types, below node_modules."""


OLDEST = Schema(
    Package(
        "schema-oldest",
        "10.4.19",
        "sha512-4kH+Ryiy529fBDZe97qnGrtpmESYaNX8/ef8WsvsUbP1ZheopUkd18r/"
        "+VTc18tX7ujOpuThXCdOBDsptj3qJw==",
        "@grafana/schema",
    ),
    "schema-oldest/dist/esm",
)
NEWEST = Schema(
    Package(
        "schema-newest",
        "12.4.11",
        "sha512-l6wX3t2/q4OTmbIVk5+ulWHaoqBQ3dPxxxWm/"
        "ONxfF/xhyy7uKgFMHBVn5ZnofXMSfhdDGl+5Km3jIevDLyBTw==",
        "@grafana/schema",
    ),
    "schema-newest/dist/types",
)
SCHEMAS = (OLDEST, NEWEST)
TYPESCRIPT = Package(
    "typescript",
    "5.9.3",
    "sha512-jl1vZzPDinLr9eUt3J/t7V6FgNEw9QjvBPdysz9KfQDD41fQrC2Y4vKQdiaUpFT4bXlb1RHhLpp8wtm6M5TgSw==",
)
PACKAGES = (
    OLDEST.package,
    NEWEST.package,
    TYPESCRIPT,
    # What the two schemas depend on.
    Package(
        "tslib",
        "2.8.1",
        "sha512-oJFu94HQb+KVduSUQL7wnpmqnfmLsOA/"
        "nAh6b6EH0wCEoK0/mPeXU6c3wKDV83MkOuHPRHtSXKKU99IBazS/2w==",
    ),
    Package(
        "schema-oldest/node_modules/tslib",
        "2.6.2",
        "sha512-AEYxH93jGFPn/a2iVAwW87VuUIkR1FVUKB77NwMF7nBTDkDrrT/"
        "Hpt/IrCJ0QXhW27jTBDcf5ZY7w6RiqTMw2Q==",
    ),
)
TSLIB_OF = {"schema-oldest": "2.6.2", "schema-newest": "2.8.1"}

# What the package's types do not say: that JSON holds an enum's values and not its members, that a panel's options
# are those of its plugin (options that are left out are the plugin's defaults), and what is Prometheus' own.
PRELUDE = """\
import type * as schema from '@grafana/schema';
import type { PrometheusDataQuery } from 'prometheus-query';

export type Json<T> = 0 extends 1 & T ? any
  : T extends string ? (string extends T ? string : `${T}`)
  : T extends number | boolean | null | undefined ? T
  : T extends Array<infer Item> ? Json<Item>[]
  : T extends object ? { [Key in keyof T]: Json<T[Key]> }
  : T;
type Optional<T> = T extends Array<infer Item> ? Optional<Item>[]
  : T extends object ? { [Key in keyof T]?: Optional<T[Key]> }
  : T;

export type Query = Json<PrometheusDataQuery>;
export type FieldConfig<Custom> =
  Omit<Json<schema.FieldConfig>, 'custom'> & { custom?: Optional<Json<Custom>> };
export type Panel<Options, Custom> =
  Omit<Json<schema.Panel>, 'options' | 'fieldConfig' | 'targets'> & {
    options: Optional<Json<Options>>;
    fieldConfig: { defaults: FieldConfig<Custom> };
    targets?: Query[];
  };
export type Row = Json<schema.RowPanel>;
export type Annotation = Omit<Json<schema.AnnotationQuery>, 'target'> & {
  expr: string; tagKeys: string; target: Query; textFormat: string; titleFormat: string;
};
export type Dashboard = Omit<Json<schema.Dashboard>, 'panels' | 'annotations'>;
"""


class CheckError(Exception):
    """The check could not be made at all."""


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    """package.json and package-lock.json; npm takes each package's place from its own configuration."""
    wanted = {
        package.path: f"npm:{package.name}@{package.version}" if package.name else package.version
        for package in (OLDEST.package, NEWEST.package, TYPESCRIPT)
    }
    root = {
        "name": "check-dashboards",
        "version": "1.0.0",
        "private": True,
        "dependencies": wanted,
    }
    locked: dict[str, Any] = {"": {**root}}
    for package in PACKAGES:
        entry: dict[str, Any] = {"version": package.version, "integrity": package.integrity}
        if package.name:
            entry["name"] = package.name
        if package.path in TSLIB_OF:
            entry["dependencies"] = {"tslib": TSLIB_OF[package.path]}
        locked[f"node_modules/{package.path}"] = entry
    lock = {
        "name": root["name"],
        "version": root["version"],
        "lockfileVersion": 3,
        "requires": True,
        "packages": locked,
    }
    return root, lock


def install() -> Path:
    """The directory that holds the packages; they are fetched where they are not there yet."""
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            raise CheckError(f"`{command}` is needed to check the dashboards, and is not there")
    TOOLS.mkdir(parents=True, exist_ok=True)
    manifest, lock = (json.dumps(content, indent=2) for content in manifests())
    stamp = TOOLS / ".installed"
    # Tests run side by side, and one of them installs.
    with (TOOLS / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != lock:
            (TOOLS / "package.json").write_text(manifest)
            (TOOLS / "package-lock.json").write_text(lock)
            arguments = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(arguments, cwd=TOOLS, capture_output=True, text=True)
            if done.returncode != 0:
                raise CheckError(f"npm could not install the types:\n{done.stdout}{done.stderr}")
            stamp.write_text(lock)
    return TOOLS / "node_modules"


def composable(types: Path, panel_type: str) -> Path:
    """The module with Options and FieldConfig of a kind of panel."""
    name = COMPOSABLES.get(panel_type, panel_type)
    found = sorted(types.glob(f"raw/composable/{name}/panelcfg/x/*types.gen.d.ts"))
    if not found:
        raise CheckError(f"@grafana/schema in {types} knows no panel type {panel_type!r}")
    return found[0]


def constant(name: str, type_: str, value: object) -> str:
    literal = json.dumps(value, indent=2, ensure_ascii=False)
    return f"export const {name}: {type_} = {literal};\n"


def nested(property_id: str, value: object) -> dict[str, object]:
    """An override's property as the defaults would hold it: custom.width becomes {"custom": {"width": ...}}."""
    first, _, rest = property_id.partition(".")
    return {first: nested(rest, value) if rest else value}


def panel_module(panel: dict[str, Any], types: Path) -> str:
    module = composable(types, panel["type"])
    # A stat has no field options of its own.
    own = re.search(r"export (?:interface|type) FieldConfig\b", module.read_text()) is not None
    overrides = panel["fieldConfig"]["overrides"]
    plain = {
        **panel,
        "fieldConfig": {"defaults": panel["fieldConfig"]["defaults"]},
    }
    lines = [
        "import type { FieldConfig, Panel } from './prelude';\n",
        f"import type * as plugin from {json.dumps(str(module).removesuffix('.d.ts'))};\n",
        f"type Custom = {'plugin.FieldConfig' if own else 'Record<string, never>'};\n",
        constant("panel", "Panel<plugin.Options, Custom>", plain),
    ]
    properties = (
        (item["matcher"]["options"], property_["id"], property_["value"])
        for item in overrides
        for property_ in item["properties"]
    )
    for index, (column, property_id, value) in enumerate(properties):
        lines.append(f"// override of {column}\n")
        lines.append(
            constant(f"override{index}", "FieldConfig<Custom>", nested(property_id, value))
        )
    return "".join(lines)


def modules(dashboard: dict[str, Any], types: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of what is given to the compiler: a module for each panel, so that its errors name it."""
    uid = dashboard["uid"]
    rest = {name: part for name, part in dashboard.items() if name not in ("panels", "annotations")}
    yield (
        f"{uid}.dashboard",
        (
            "import type { Dashboard } from './prelude';\n"
            + constant("dashboard", "Dashboard", rest)
        ),
    )
    yield (
        f"{uid}.annotations",
        (
            "import type { Annotation } from './prelude';\n"
            + constant("annotations", "Annotation[]", dashboard["annotations"]["list"])
        ),
    )
    for panel in dashboard["panels"]:
        name = f"{uid}.panel-{panel['id']}"
        if panel["type"] != "row":
            yield name, panel_module(panel, types)
            continue
        yield (
            name,
            (
                "import type { Row } from './prelude';\n"
                + constant("row", "Row", {**panel, "panels": []})
            ),
        )
        for inner in panel["panels"]:
            yield f"{uid}.panel-{inner['id']}", panel_module(inner, types)


def compiler_errors(
    dashboards: Sequence[dict[str, Any]], schema: Schema, node_modules: Path
) -> list[str]:
    """What the compiler says against one version of the types; nothing where all is well."""
    types = node_modules / schema.types
    oldest = node_modules / OLDEST.types
    # Later versions of the package have no type for Prometheus' query any more.
    query = next(iter(oldest.glob("raw/composable/prometheus/dataquery/x/*types.gen.d.ts")))
    configuration = {
        "compilerOptions": {
            "strict": True,
            "noEmit": True,
            "skipLibCheck": True,
            "target": "es2022",
            "module": "esnext",
            "moduleResolution": "bundler",
            "types": [],
            "paths": {
                "@grafana/schema": [str(types / "index.d.ts")],
                "prometheus-query": [str(query)],
            },
        },
        "include": ["*.ts"],
    }
    with tempfile.TemporaryDirectory(prefix="check-dashboards-") as name:
        directory = Path(name)
        (directory / "tsconfig.json").write_text(json.dumps(configuration))
        (directory / "prelude.ts").write_text(PRELUDE)
        for dashboard in dashboards:
            for module, text in modules(dashboard, types):
                (directory / f"{module}.ts").write_text(text)
        compiler = node_modules / "typescript" / "bin" / "tsc"
        done = subprocess.run(
            ["node", str(compiler), "--pretty", "false", "-p", "."],
            cwd=directory,
            capture_output=True,
            text=True,
        )
    output = done.stdout.splitlines()
    if done.returncode == 0 and not output:
        return []
    # An error's further lines are indented.
    found = [line for line in output if line and not line.startswith(" ")]
    return found or [f"the compiler ended with status {done.returncode}: {done.stderr.strip()}"]


def problems(dashboards: Sequence[dict[str, Any]]) -> list[str]:
    """Every complaint, with the version of Grafana's types that it comes from."""
    node_modules = install()
    return [
        f"Grafana {schema.package.version}: {error}"
        for schema in SCHEMAS
        for error in compiler_errors(dashboards, schema, node_modules)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="dashboards; ours by default")
    files = parser.parse_args(arguments).files or sorted(DASHBOARDS.glob("*.json"))
    if not files:
        print("there is no dashboard to check", file=sys.stderr)
        return 2
    try:
        found = problems([json.loads(path.read_text(encoding="utf-8")) for path in files])
    except CheckError as error:
        print(error, file=sys.stderr)
        return 2
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        versions = " and ".join(schema.package.version for schema in SCHEMAS)
        print(f"{', '.join(path.name for path in files)}: right by the types of Grafana {versions}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
