"""Processes for simulations.

Each has a CPU of its own: of the threads of a simulation (`operator.program`) one runs at a time,
and on several CPUs, each time another one goes on it has to be woken up: a simulation then takes
half as long again. Each looks for garbage in cycles, of which there is little, seldom: else that
takes a quarter of the time.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue

_COLLECTS_AFTER = 100_000  # new objects; 700 by default


def process_pool(processes: int | None) -> ProcessPoolExecutor:
    """`processes`: as many as there are CPUs if None."""
    cpus = sorted(os.sched_getaffinity(0))
    processes = processes or len(cpus)
    numbers: SimpleQueue[int] = multiprocessing.SimpleQueue()
    for cpu in itertools.islice(itertools.cycle(cpus), processes):
        numbers.put(cpu)
    return ProcessPoolExecutor(processes, initializer=_begin, initargs=(numbers,))


def _begin(cpus: SimpleQueue[int]) -> None:
    os.sched_setaffinity(0, {cpus.get()})
    gc.freeze()
    gc.set_threshold(_COLLECTS_AFTER)
