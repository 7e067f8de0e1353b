"""One image for all tests of a run."""

from __future__ import annotations

import pytest

from tests.image import containers
from tests.leaving_out import leave_out


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the image, built from the Dockerfile as it is now."""
    lacking = containers.why_not()
    if lacking is not None:
        leave_out(lacking)
    containers.build(tmp_path_factory.mktemp("build"))
    return containers.IMAGE
