"""How `make test` runs the tests."""

import re
import shlex
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parent.parent.parent / "Makefile"


def test_a_test_that_kills_its_own_process_fails_the_run_and_is_named(pytester: pytest.Pytester) -> None:
    [options] = re.findall(r"^PYTEST := \S+ -m pytest (.*)$", MAKEFILE.read_text(), flags=re.MULTILINE)
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
    run = pytester.runpytest_subprocess(*shlex.split(options), "-p", "no:cacheprovider", timeout=120)
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*crashed while running 'test_a_test_that_kills*::test_that_dies'*"])
