"""The golden checkpoints, loaded and compiled once a session."""

import pytest

from tests.engine.serving import EXACT, MODELS, Golden, load_golden


@pytest.fixture(scope="session", params=MODELS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load_golden(request.param)


@pytest.fixture(scope="session")
def model() -> Golden:
    return load_golden(EXACT)
