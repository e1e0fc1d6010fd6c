"""Session set-up shared by all tests: Triton mode, Hypothesis profiles, threads, golden data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
GOLDEN_FOLDERS = (ROOT / "tests" / "data" / "golden", ROOT.parent / "shared" / "golden")
DEVICE_MARKERS = ("gpu", "dist_gpu")
COMPILED = pytest.StashKey[bool]()


def _register_profiles() -> None:
    """Profiles dev, ci and deep; `CI=true` takes ci, `--hypothesis-profile NAME` overrides."""
    # How long an example takes says something about the machine, not about the property.
    base = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("dev", base, max_examples=50)
    settings.register_profile("ci", base, max_examples=200, derandomize=True, print_blob=True)
    settings.register_profile("deep", base, max_examples=5000)
    settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")


# Before the test modules are imported: `@settings(...)` on a test copies the profile in force then.
_register_profiles()


def selects_device_tests(marker_expression: str) -> bool:
    """Whether `-m EXPRESSION` would run a test marked only `gpu` or only `dist_gpu`."""
    if not marker_expression:
        return True
    expression = Expression.compile(marker_expression)

    def selects(marker: str) -> bool:
        return expression.evaluate(lambda name, /, **_keywords: name == marker)

    return any(selects(marker) for marker in DEVICE_MARKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Choose compiled or interpreted Triton before a test module imports pcpkit.

    Triton decides when a kernel is decorated, so one process runs either mode, never both.
    """
    if "pcpkit.kernels._jit" in sys.modules:
        raise pytest.UsageError(
            "conftest files expected to import pcpkit inside fixtures, got it imported already; "
            "move the import into the fixture"
        )
    compiled = selects_device_tests(config.option.markexpr) and torch.cuda.is_available()
    config.stash[COMPILED] = compiled
    if compiled:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    # The tensors are tiny: more threads only wait for one another, 10 times slower on busy cores.
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    """Say which mode this run tests."""
    mode = "compiled" if config.stash[COMPILED] else "interpreted"
    return f"torch: {torch.__version__}, {torch.cuda.device_count()} CUDA devices; Triton: {mode}"


def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip, visibly, what cannot run in this process's mode."""
    compiled = config.stash[COMPILED]
    missing = "a CUDA device" if not torch.cuda.is_available() else "a compiled run: -m gpu"
    for item in items:
        on_device = any(item.get_closest_marker(marker) for marker in DEVICE_MARKERS)
        if on_device and not compiled:
            item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))
        elif item.get_closest_marker("dist_gpu") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
        elif compiled and not on_device:
            item.add_marker(pytest.mark.skip(reason="interpreted test in a compiled run"))


@pytest.fixture(scope="session")
def golden_dir() -> Callable[[str], Path]:
    """`golden_dir(case)` is the folder of one golden case; the test skips where it is absent.

    Looks in tests/data/golden/<case>, then in ../shared/golden/<case> beside the checkout.
    """

    def find(case: str) -> Path:
        for folder in GOLDEN_FOLDERS:
            if (folder / case / "golden.safetensors").is_file():
                return folder / case
        pytest.skip(f"golden case {case} is in none of {', '.join(map(str, GOLDEN_FOLDERS))}")

    return find
