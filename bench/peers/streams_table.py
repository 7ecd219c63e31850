#!/usr/bin/env python3
"""streams_table.py [--report FILE] [--runs N] [--duration SECS] [--seeds N]: the goals of streams in one table.

Each row has the work, the peer, the figure (median and range), the goal and the verdict. Most are goals of the suite `streams`, and are
read from the JSON that it prints; `--report` names such a file, so that the suite is not run. Rows of other programs follow: instructions
by callgrind, loss.py, http.py, and the test of idle connections. What is not measured is printed with the reason. Needs root and a release build:

    cargo build --release && cargo build --release -p netmem-bench
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BENCH = os.environ.get("NETMEM_BENCH", str(TARGET / "release/netmem-bench"))
NETMEM = os.environ.get("NETMEM", str(TARGET / "release/netmem"))
# Of an MTU of 1500.
PAYLOAD = 1448
# Bytes that callgrind's run moves: one for each nanosecond of its duration.
COUNTED = 16_000_000
# The section of the rows of segments, as `turns.rs` names it. There is one of requests, too.
SECTION = "both ends and the device in turns on one thread"
# Seconds of a program.
TIMEOUT = 7200


class Failed(Exception):
    """Why a row has no figure."""


def output(*command, **variables):
    environment = os.environ | variables | {"NETMEM": NETMEM}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    except OSError as error:
        raise Failed(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{command[0]} has not ended after {TIMEOUT} s") from error
    if done.returncode != 0:
        raise Failed(f"{command[0]} ended with {done.returncode}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]}")
    return done.stdout


def found(pattern, text, program):
    """The match of a pattern in what a program has printed."""
    if match := re.search(pattern, text, re.M):
        return match
    raise Failed(f"{program} has not printed {pattern}")


def reached(value, sign, bound):
    return "reached" if (value >= bound if sign == ">=" else value <= bound) else "missed"


def suite_rows(args):
    """The goals of the suite, each of which reads `WORK: OURS / PEER SIGN BOUND`."""
    if args.report:
        report = json.loads(pathlib.Path(args.report).read_text())
        # A file of results has several suites.
        report = next((suite for suite in report.get("suites", [report]) if suite["suite"] == "streams"), None)
        if report is None:
            raise Failed(f"{args.report} has no suite streams")
    else:
        options = [f"--{name}={value}" for name, value in [("runs", args.runs), ("duration", args.duration)] if value]
        report = json.loads(output(BENCH, "streams", "--json", "--long", *options))
    # The kernel's connections, which are not in all rows, use what a row's remark names.
    uses = re.compile(r"connections use (\w+)")
    measured = [row for row in report["variants"] if not row.get("skipped")]
    kernel = {row["name"]: used[1] for row in measured if (used := uses.search(row.get("note") or ""))}
    for goal in report["goals"]:
        work, compared = goal["goal"].rsplit(": ", 1)
        names, sign, bound = found(r"^(.*) (>=|<=) (\S+)$", compared, "the suite").groups()
        ours, peer = names.split(" / ")
        value = goal.get("value")
        figure = f"{value['median']:.2f} ({value['min']:.2f}..{value['max']:.2f})" if value else goal.get("why", "not measured")
        peer += f", {kernel[peer]}" if peer in kernel else ""
        yield f"{work}: {ours}", peer, figure, f"{sign} {bound}", goal["verdict"]


def instructions_row(_args):
    """Counts the function `timed` of `turns.rs`, which is compiled for each stack, and for segments and requests. Its instances have the same
    name, but for a hash. The rows run those of segments, so the others count nothing."""
    if not shutil.which("valgrind") or not shutil.which("nm"):
        raise Failed("valgrind or nm is not installed")
    counts = {}
    for symbol in re.findall(r" (\S*7streams5turns5timed\S*)$", output("nm", BENCH), re.M):
        with tempfile.TemporaryDirectory() as folder:
            counted = ["--tool=callgrind", "--demangle=no", f"--toggle-collect={symbol}", f"--callgrind-out-file={folder}/out"]
            run = [BENCH, "streams", "--rows", SECTION, "--runs", "1", f"--duration={COUNTED / 1e9}"]
            output("valgrind", *counted, *run)
            out = pathlib.Path(folder, "out")
            text = out.read_text() if out.exists() else ""
        total = re.search(r"^totals: (\d+)", text, re.M)
        if not total or int(total[1]) == 0:
            continue
        stack = "smoltcp" if re.search(r"^fn=.*smoltcp", text, re.M) else "ours"
        counts[stack] = int(total[1]) / (COUNTED / PAYLOAD)
    if set(counts) != {"ours", "smoltcp"}:
        raise Failed(f"callgrind has counted {counts}")
    return f"{counts['ours']:.0f} (smoltcp {counts['smoltcp']:.0f})", reached(counts["ours"], "<=", 4600)


def idle_row(_args):
    test = ["cargo", "test", "--quiet", "--release", "-p", "netmem-inet", "--test", "memory", "idle", "--", "--nocapture"]
    text = output(*test, NETMEM_CONNECTIONS="100000")
    own, remote = map(int, found(r"(\d+) bytes for each of(?:.|\n)*?(\d+) bytes for each of", text, "the test").groups())
    # The test fails if an idle connection holds a page.
    return f"{own} bytes, no page (with a stream of any thread {remote})", reached(own, "<=", 1024)


def http_row(_args):
    text = output("bench/peers/http.py")
    median, spread = found(r"^netmem / nginx +(\S+) (\S+)$", text, "http.py").groups()
    congestion = found(r"^the kernel's connections use (\S+)$", text, "http.py")[1]
    return f"{median} {spread}, the kernel's connections with {congestion}", reached(float(median), "<=", 0.6)


def loss_rows(args):
    text = output("bench/peers/loss.py", "--seeds", str(args.seeds))
    for row in ["netmem to kernel", "kernel to netmem"]:
        ratio = float(found(rf"^{row} .* (\S+)$", text, "loss.py")[1])
        yield row, f"{ratio:.2f} (median of the ratios of {args.seeds} seeds)", reached(ratio, ">=", 1.0)


def rows(args):
    def one(work, peer, goal, measure):
        try:
            figure, verdict = measure(args)
        except Failed as why:
            figure, verdict = str(why), "skipped"
        return work, peer, figure, goal, verdict

    yield one("instructions of a segment of 1448 bytes, both ends and the device", "smoltcp", "<= 4600", instructions_row)
    try:
        yield from suite_rows(args)
    except Failed as why:
        yield "the goals of the suite", "-", str(why), "-", "skipped"
    loss = "throughput at 1 % loss and 20 ms"
    try:
        yield from ((f"{loss}: {row}", "kernel to kernel", figure, ">= 1.0", verdict) for row, figure, verdict in loss_rows(args))
    except Failed as why:
        yield loss, "kernel to kernel", str(why), ">= 1.0", "skipped"
    http = "HTTP, a connection opened, served and closed: the server's CPU time, the kernel's clients behind a tap"
    yield one(http, "nginx", "<= 0.6", http_row)
    yield one("an idle connection", "-", "<= 1 KiB, no page", idle_row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", help="a file with the JSON of the suite")
    parser.add_argument("--runs", type=int, help="of the suite")
    parser.add_argument("--duration", help="of a run of the suite, in seconds")
    parser.add_argument("--seeds", type=int, default=200, help="of loss.py")
    args = parser.parse_args()
    print("| work | peer | figure | goal | |\n| --- | --- | --- | --- | --- |")
    for row in rows(args):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
