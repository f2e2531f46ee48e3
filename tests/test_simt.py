"""The host executor finds what it claims to find: each kernel of simt/planted runs with its bug and without."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest
from simt.build import LANES, planted

TIMEOUT = 60  # seconds

# What the executor itself reports, whatever the sanitizer: the words that follow the kernel's name.
REPORTED = {
    "divergent_barrier": r"block 0: threads wait .*: 0 to 63 at the barrier of \S*barriers.cpp:\d+; 64 to 127 left",
    "early_return": r"block \d: threads wait .*: 0 to 4 at the barrier of \S*barriers.cpp:\d+; 5 to 5 left; 6 to 127 at",
    "different_barriers": r"0 to 63 at the barrier of \S*barriers.cpp:\d+; 64 to 127 at the barrier of \S*barriers.cpp:\d+",
    "overlapping_arrays": r"block 0, thread \d+: shared arrays overlap: 512 bytes at \d+ and 512 at \d+",
    "disagreeing_counts": r"shared arrays overlap: 5(08|12) bytes at 0 and 5(08|12) at 0",
    "array_beyond_launch": r"a shared array of 516 bytes at 0 does not lie, aligned to 16, in the 512 bytes of the launch",
    "misaligned_load": r"a packet of 16 bytes is not aligned",
    "misaligned_store": r"thread 0: a packet of 8 bytes is not aligned",
    "too_many_threads": r"\d+ threads, takes whole warps, up to 1024",
    "half_a_warp": r"\d+ threads, takes whole warps, up to 1024",
    "too_much_shared": r"49153 bytes of shared memory, takes up to 49152",
    "lane_outside_width": r"asks for lane 8 of 8 at \S*shuffles.cpp:\d+",
    "negative_lane": r"asks for lane -1 of 8 at \S*shuffles.cpp:\d+",
    "mask_outside_width": r"asks for lane \d+ of 8 at \S*shuffles.cpp:\d+",
    "missing_lane": r"0 to 4 in the shuffle of \S*shuffles.cpp:\d+; 5 to 5 left; 6 to 7 in the shuffle of \S*; 8 to 127 left",
    "two_shuffles": r"lanes of one group are in shuffles at \S*shuffles.cpp:\d+ and \S*shuffles.cpp:\d+: ",
    "barrier_for_shuffle": r"0 to 4 in the shuffle of \S*; 5 to 5 at the barrier of \S*; 6 to 7 in the shuffle of",
}
# Found by wrong results: memory that nobody wrote is NaN, and the order of threads is permuted.
WRONG = ("missing_barrier", "unwritten_shared")
ADDRESS = {
    "shared_out_of_range": r"AddressSanitizer: use-after-poison[\s\S]*shared_out_of_range_kernel\S* \S*memory.cpp:\d+",
    "global_out_of_range": r"AddressSanitizer: heap-buffer-overflow[\s\S]*global_out_of_range_kernel\S* \S*memory.cpp:\d+",
    "local_out_of_range": r"memory.cpp:\d+:\d+: runtime error: index 4 out of bounds",
}
# By file of the accesses.
RACES = {
    "missing_barrier": "barriers.cpp",
    "missing_second_barrier": "barriers.cpp",
    "reused_buffer": "barriers.cpp",
    "blocks_write_one_address": "memory.cpp",
    "blocks_write_one_address_between_barriers": "memory.cpp",
    "atomics": "memory.cpp",
}
# Nothing planted: `good` has to be right, under every sanitizer.
RIGHT = ("independent_groups", "launches_in_order", "recovery", "shuffle_values", "stack_overflow", "sums")
GOOD = sorted({*REPORTED, *WRONG, *ADDRESS, *RACES, *RIGHT})


def run(executable, case: str, which: str, **environment) -> subprocess.CompletedProcess:
    settings = {f"PAGED_ATTN_SIMT_{name.upper()}": str(value) for name, value in environment.items()}
    command = [str(executable), case, which]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=TIMEOUT)


def check_right(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0 and done.stdout.endswith("right\n") and not done.stderr, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("lanes", LANES)
def test_nothing_is_reported_without_a_bug(lanes, case):
    check_right(run(planted(lanes), case, "good"))


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_are_silent_without_a_bug(sanitizer):
    executable = planted(32, sanitizer)
    for case in GOOD:
        check_right(run(executable, case, "good"))


@pytest.mark.parametrize("case", REPORTED)
@pytest.mark.parametrize("lanes", LANES)
def test_violation_is_reported(lanes, case):
    done = run(planted(lanes), case, "bad")
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(f"violation: (planted|nothing): .*{REPORTED[case]}", done.stdout), done.stdout


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("lanes", LANES)
def test_bug_makes_results_wrong(lanes, case):
    assert run(planted(lanes), case, "bad").stdout == "wrong\n"


def test_write_beyond_a_shared_array_is_reported_without_a_sanitizer_too():
    done = run(planted(32), "shared_out_of_range", "bad")
    assert "somebody wrote beyond the shared array of 512 bytes at 0" in done.stdout


def test_stack_overflow_stops_the_program():
    assert run(planted(32), "stack_overflow", "bad").returncode == -signal.SIGSEGV


@pytest.mark.parametrize("case", ADDRESS)
@pytest.mark.parametrize("lanes", LANES)
def test_address_sanitizer_finds(lanes, case):
    done = run(planted(lanes, "address"), case, "bad")
    assert done.returncode == 1 and re.search(ADDRESS[case], done.stderr), done.stdout + done.stderr


@pytest.mark.parametrize("case", RACES)
@pytest.mark.parametrize("workers", [1, 2])
def test_thread_sanitizer_finds(workers, case):
    """Under every order of threads: what a race does does not matter, that it is one does."""
    for seed in range(3):
        done = run(planted(32, "thread"), case, "bad", threads=workers, seed=seed)
        assert done.returncode == 66, done.stdout + done.stderr
        assert re.search(rf"ThreadSanitizer: data race[\s\S]*{RACES[case]}:\d+", done.stderr), done.stderr


@pytest.mark.parametrize("lanes", LANES)
def test_order_follows_from_the_seed(lanes):
    def order(seed):
        return check_right(run(planted(lanes), "order", "good", threads=1, seed=seed)).split()[:-1]

    orders = [order(seed) for seed in range(6)]
    assert order(3) == orders[3]
    assert all(sorted(map(int, one)) == list(range(256)) for one in orders)
    assert len({tuple(one) for one in orders}) == 6
    assert len({int(one[0]) // 128 for one in orders}) == 2  # either block comes first
    assert all(sum(int(b) == int(a) + 1 for a, b in zip(one, one[1:], strict=False)) < 64 for one in orders)  # no rotation


@pytest.mark.parametrize("lanes", LANES)
def test_sums_depend_on_neither_seed_nor_workers(lanes):
    assert len({run(planted(lanes), "sums", "good", seed=seed, threads=1 + seed % 3).stdout for seed in range(8)}) == 1


def test_portable_switch():
    executable = planted(32, ucontext=True)
    for case in ("shuffle_values", "sums", "recovery"):
        check_right(run(executable, case, "good"))
    assert "left" in run(executable, "early_return", "bad").stdout
