"""What every test shares: one thread, reproducible draws, no network, and one tolerance for each precision."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Before transformers or matplotlib are imported, by the tests or by the processes they start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

# pytest-xdist runs one worker a core: more threads than that only get in each other's way.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}

settings.register_profile(
    "coset",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=15,
    # Law suites are inherited, so one test function runs in several classes.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
settings.load_profile("coset")


@pytest.fixture(scope="session", params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Both precisions in which everything must hold."""
    return request.param


@pytest.fixture(scope="session")
def tolerance(dtype: torch.dtype) -> float:
    """How close results of `dtype` must be: the one tolerance of its precision."""
    return TOLERANCE[dtype]


@pytest.fixture(autouse=True, scope="module")
def _deterministic() -> Iterator[None]:
    """Libraries that draw from the global generators give the same numbers in every run and order of the modules."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
