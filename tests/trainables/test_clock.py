import subprocess
import sys
import time

from trainables.clock import process_start_unix_s

TICK_S = 0.02
"""more than Linux's unit of the start of a process"""


def test_the_start_of_a_process_is_known_to_one_tick() -> None:
    code = (
        "import time; time.sleep(0.5); from trainables.clock import process_start_unix_s as f; print(f(), time.time())"
    )
    for _ in range(3):
        before = time.time()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        started, ended = map(float, done.stdout.split())
        assert before - TICK_S <= started <= ended - 0.5 + TICK_S


def test_the_start_of_a_process_stays_the_same() -> None:
    first = process_start_unix_s()
    time.sleep(0.1)
    assert abs(process_start_unix_s() - first) < TICK_S
