"""How `make test` runs the tests."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    """Run the files of `pytester` with the options of the Makefile."""
    [options] = re.findall(r"^PYTEST := \S+ -m pytest (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return pytester.runpytest_subprocess(*shlex.split(options), "-p", "no:cacheprovider", timeout=240)


def test_a_file_and_all_tests_with_the_local_ray_run_in_one_process_each(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SEEN", str(pytester.path))
    pytester.makeconftest((ROOT / "tests/conftest.py").read_text())
    body = """
        import os
        import pathlib
        import time

        import pytest


        @pytest.fixture
        def local_ray():
            return "local_ray"


        def see(group):
            name = f"{group} {os.environ['PYTEST_XDIST_WORKER']}"
            pathlib.Path(os.environ["SEEN"], name).touch()
            time.sleep(0.1)


        @pytest.mark.parametrize("number", range(4))
        def test_of_the_file(number):
            see(pathlib.Path(__file__).name)


        @pytest.mark.parametrize("number", range(4))
        def test_with_ray(number, local_ray):
            see(local_ray)
        """
    pytester.makepyfile(test_one=body, test_two=body)
    assert run(pytester).ret == 0
    seen = sorted(path.name.split()[0] for path in pytester.path.glob("* gw*"))
    assert seen == ["local_ray", "test_one.py", "test_two.py"]


def test_a_test_that_kills_its_own_process_fails_the_run_and_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        import signal

        import pytest

        pytestmark = pytest.mark.xdist_group("one process")


        def test_before():
            pass


        def test_that_dies():
            os.kill(os.getpid(), signal.SIGKILL)


        def test_after():
            pass
        """
    )
    result = run(pytester)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*crashed while running 'test_a_test_that_kills*::test_that_dies*'*"])
