"""Processes for simulations, each on a CPU of its own.

Of the threads of a simulation (`operator.program`) one runs at a time. On several CPUs, each time
another one goes on it has to be woken up: a simulation then takes half as long again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue


def process_pool(processes: int | None) -> ProcessPoolExecutor:
    """`processes`: as many as there are CPUs if None."""
    cpus = sorted(os.sched_getaffinity(0))
    processes = processes or len(cpus)
    numbers: SimpleQueue[int] = multiprocessing.SimpleQueue()
    for cpu in itertools.islice(itertools.cycle(cpus), processes):
        numbers.put(cpu)
    return ProcessPoolExecutor(processes, initializer=_stay_on_one, initargs=(numbers,))


def _stay_on_one(cpus: SimpleQueue[int]) -> None:
    os.sched_setaffinity(0, {cpus.get()})
