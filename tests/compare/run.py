#!/usr/bin/env python3
"""Whether `perf --against` judges rightly: a build against itself, and one with a known delay against
the same without.

The build is this tree with a delay in the receive loop of `perf`: pauses of the CPU, so many for each
frame that `small-64 pool same` is 3 % slower. The script measures how many these are. The build is
compared with itself without pauses, by a script that starts it so: two builds differ by more than 3 %
by where their code lies.

    tests/compare/run.py [TIMES]     both comparisons as many times

It fails if the build differs from itself in any row, or if the delay is not found, more than once in
ten times. Without TIMES, as in `.ci/run`, the delay is looked for in a third of the pairs, and what
fails is made once more: of a hundred comparisons of equal builds, one may find a difference, and the
delay's effect drifts with the machine.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", TREE / "target"))
DURATION = ["--duration", "20ms"]
ROW = ["--mode", "small", "--size", "64", "--alloc", "pool", "--consumer", "same", *DURATION]
DELAY = 0.03
# Pauses for a thousand frames.
PAUSES = "NETMEM_COMPARE_PAUSES"
PLACE = "poll.receive(budget, &mut program)"
DELAYED = f"""{{
    static PAUSES: std::sync::LazyLock<usize> = std::sync::LazyLock::new(|| {{
        std::env::var("{PAUSES}").map_or(0, |pauses| pauses.parse().unwrap())
    }});
    static DUE: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let n = {PLACE};
    let mut due = DUE.load(Ordering::Relaxed) + n * *PAUSES;
    while due >= 1000 {{
        std::hint::spin_loop();
        due -= 1000;
    }}
    DUE.store(due, Ordering::Relaxed);
    n
}}"""


def build(tree, to):
    built = TARGET / "release" / "netmem"
    # The build of this tree, if there is one, is put back: others run it.
    kept = built.with_name("netmem.kept")
    if built.exists():
        built.replace(kept)
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "netmem-cli"]
    subprocess.run(command, cwd=tree, check=True, env={**os.environ, "CARGO_TARGET_DIR": str(TARGET)})
    shutil.move(built, to)
    if kept.exists():
        kept.replace(built)


def delayed(copy):
    """A copy of the tree, as it is, with the delay."""
    files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                           cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (TREE / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TREE / name, copy / name)
    driver = copy / "crates/cli/src/perf/driver.rs"
    text = driver.read_text()
    if text.count(PLACE) != 1:
        sys.exit(f"{driver}: the receive loop has changed; this script looks for `{PLACE}`")
    driver.write_text(text.replace(PLACE, DELAYED))


def perf(binary, arguments, pauses=0):
    done = subprocess.run([binary, "perf", *arguments, "--json"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True, env={**os.environ, PAUSES: str(pauses)})
    return json.loads(done.stdout)


def driver_time(binary, pauses):
    return perf(binary, [*ROW, "--runs", "1"], pauses)["variants"][0]["ns_per_packet"]


def effect(binary, pauses, pairs):
    """By how much the pauses make a frame slower: the median of pairs. And its time without them."""
    ratios, plain = [], []
    for pair in range(pairs):
        order = (0, pauses) if pair % 2 else (pauses, 0)
        times = {pauses: driver_time(binary, pauses) for pauses in order}
        ratios.append(times[pauses] / times[0])
        plain.append(times[0])
    return statistics.median(ratios) - 1, statistics.median(plain)


def calibrate(binary):
    """The pauses for a thousand frames that make them slower by the delay. A part of a pause costs
    nothing where the driver waits for memory meanwhile, so what many pauses cost is only a first guess."""
    many = 1000
    slower, plain = effect(binary, many, 9)
    pauses = round(many * DELAY / slower)
    for _ in range(3):
        slower, plain = effect(binary, pauses, 80)
        print(f"a frame takes {plain:.1f} ns; with {pauses} pauses for 1000 frames {slower:+.1%}", flush=True)
        if abs(slower - DELAY) < DELAY / 6:
            break
        pauses = round(pauses * min(max(DELAY / max(slower, DELAY / 3), 0.5), 3))
    return pauses


def compare(binary, other, arguments, pairs, pauses=0):
    begin = time.monotonic()
    report = perf(binary, [*arguments, "--against", other, "--runs", str(pairs)], pauses)
    for row in report["compared"]:
        if row["verdict"] != "no_difference" or len(report["compared"]) == 2:
            change = row["change"]
            low, high = change["interval"]
            print(f"  {row['name']}, {row['quantity']}: {row['verdict']}, {change['median_pct']:+.1f} % "
                  f"[{low:+.1f}..{high:+.1f}], p {row['p']:.4f}")
    print(f"  {len(report['compared'])} comparisons, {report['pairs']} pairs, {time.monotonic() - begin:.0f} s", flush=True)
    return {(row["name"], row["quantity"]): row["verdict"] for row in report["compared"]}


def main():
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        delayed(place / "tree")
        build(place / "tree", place / "build")
        without = place / "without"
        without.write_text(f'#!/bin/sh\n{PAUSES}=0 exec "{place / "build"}" "$@"\n')
        without.chmod(0o755)

        def is_equal():
            print("a build against itself, all rows:", flush=True)
            verdicts = compare(place / "build", without, DURATION, 24)
            return len(verdicts) > 2 and set(verdicts.values()) == {"no_difference"}

        def is_found():
            # Anew each time: the effect of a pause drifts with the machine.
            pauses = calibrate(place / "build")
            print("with the delay against without:", flush=True)
            verdicts = compare(place / "build", without, ROW, 600 if times else 200, pauses)
            return verdicts["small-64 pool same x1", "driver"] == "worse"

        if not times:
            return 0 if (is_equal() or is_equal()) and (is_found() or is_found()) else 1
        equal = found = 0
        for _ in range(times):
            equal, found = equal + is_equal(), found + is_found()
        print(f"no difference to itself: {equal} of {times}; the delay of {DELAY:.0%} found: {found} of {times}")
        return 0 if min(equal, found) >= times - times // 10 else 1


if __name__ == "__main__":
    sys.exit(main())
