"""What the gradient noise scale costs a step of training: steps with it and without it, after the training is over."""

import gc
import math
import statistics
import time

from trainables.epochs import Taken
from trainables.process import drop_buckets
from trainables.timing import clock_for
from trainables.trainee import Trainee

BLOCKS, BLOCK_S, LEAST_STEPS = 5, 0.2, 3


def noise_cost(here: Trainee, taken: Taken) -> float:
    """Seconds of a step with the noise scale / without, on these samples; all ranks of the trial call it.

    Of each the median of blocks, on the slowest rank; one after the other, for DDP has one hook. It trains on, and
    leaves a trainee without noise scale: nothing of the training may follow.
    """
    watched_s = _step_s(here, taken)
    here.leave_out_noise()
    gc.collect()  # the second wrapper is made when the first is gone
    if here.trial.parallel != "none":
        drop_buckets(here.group, here.device)
    here.build(watches_noise=False)
    here.prepared(taken)
    return watched_s / _step_s(here, taken)


def _step_s(here: Trainee, taken: Taken) -> float:
    clock = clock_for(here.device)

    def block_s(steps: int) -> float:
        here.barrier()
        clock.synchronize()
        began_s = time.perf_counter()
        for _ in range(steps):
            here.advance(taken)
        clock.synchronize()
        return (time.perf_counter() - began_s) / steps

    block_s(LEAST_STEPS)
    steps = max(LEAST_STEPS, math.ceil(BLOCK_S / max(here.gathered(block_s(LEAST_STEPS)))))
    return max(map(statistics.median, here.gathered([block_s(steps) for _ in range(BLOCKS)])))
