"""Says what is wrong with Kubernetes objects. Runs in .venv/tools/chart, which has the schemas and models.

Each line of standard input is `{"kubernetes": "1.33", "documents": [...]}`; each line of standard output is the
list of complaints about it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]

OPERATOR = "monitoring.coreos.com/v1"


def complaint(document: dict[str, Any], kubernetes: str) -> str | None:
    """What is wrong with one object, or None."""
    name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    try:
        if document.get("apiVersion") == OPERATOR:
            # Imported where it is needed: it takes two seconds.
            models = importlib.import_module("cloudcoil.models.prometheus_operator.v1")
            getattr(models, document["kind"]).model_validate(document, extra="forbid")
        else:
            kubernetes_validate.validate(document, kubernetes, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"{name}: {error.message}"
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        return f"{name}: {where}: {error.message[:300]}"
    except ValueError as error:
        return f"{name}: {error}"
    return None


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        found = [complaint(document, asked["kubernetes"]) for document in asked["documents"]]
        print(json.dumps([each for each in found if each]), flush=True)


if __name__ == "__main__":
    main()
