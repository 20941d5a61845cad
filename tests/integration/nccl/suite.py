"""Run every case on groups of 4, 2 and 1 ranks, then the faults, and compare: one script, also without pytest.

    python tests/integration/nccl/suite.py                     # NCCL ranks on one GPU
    python tests/integration/nccl/suite.py --platform cpu      # the same over Gloo
    python tests/integration/nccl/suite.py --only "xla in float64" --faults

It prints a table of all results and ends with exit code 1 if one of them is wrong.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # of this process alone, which only reads what ranks have written
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "src")]

from integration.nccl import compare, faults  # noqa: E402
from integration.nccl.cases import AFTER, GROUPS  # noqa: E402
from integration.nccl.ranks import RankGroup, find_free_port  # noqa: E402


class Suite:
    """The results of all groups, which run beside each other."""

    def __init__(self, platform, folder, only=()):
        self.platform, self.folder, self.results = platform, folder, {}
        self.cases = {case.name: case for cases in GROUPS.values() for case in cases}
        self.wanted = self._select(only)
        self._done = {name: threading.Event() for name in self.cases}

    def _select(self, only):
        """Return the names of the cases to run: those asked for, and what they are compared with or go on from."""
        wanted = set(only or self.cases)
        while True:
            needed = {self.cases[name].like for name in wanted} | {AFTER.get(name, "") for name in wanted}
            needed |= {other for name in wanted for other in compare.list_noise(name)}
            if (needed := needed - {""}) <= wanted:
                return wanted
            wanted |= needed

    def run(self):
        """Run all groups at the same time and return the rows of the table."""
        threads = [threading.Thread(target=self._run_group, args=(ranks,)) for ranks in GROUPS]
        for thread in threads:
            thread.start()
        rows = [self._make_row(self.cases[name]) for name in self.cases if name in self.wanted]
        for thread in threads:
            thread.join()
        return rows

    def _run_group(self, ranks):
        cases = [case for case in GROUPS[ranks] if case.name in self.wanted]
        if not cases:
            return
        group = RankGroup(ranks, self.platform, self.folder, find_free_port())
        try:
            print(f"{ranks} ranks: {group.read()[0]}", flush=True)
            for case in cases:
                if case.name in AFTER:
                    self._done[AFTER[case.name]].wait()
                results = group.run(case.to_message(self.folder))
                self.results[case.name] = results
                self._done[case.name].set()
                failed = any("error" in result for result in results)
                print(
                    f"{time.strftime('%X')} {case.name}: {max(r.get('seconds', 0) for r in results):.1f} s"
                    f"{' FAILED' * failed}",
                    flush=True,
                )
                if failed and any("seconds" not in result for result in results):
                    return  # a rank is gone
            print(f"{ranks} ranks ended with {group.close()}", flush=True)
        finally:
            group.kill()
            for case in cases:
                self._done[case.name].set()

    def _make_row(self, case):
        """Return a case's row once it, and all that it is compared with, are done."""
        for name in {case.name, case.like, *compare.list_noise(case.name)} - {""}:
            self._done[name].wait()
        results = self.results.get(case.name, [{"error": "not run"}])
        seconds = max(result.get("seconds", 0) for result in results)
        row = {"name": case.name, "ranks": case.ranks, "like": case.like, "seconds": seconds}
        if errors := [result["error"] for result in results if "error" in result]:
            return row | {"right": False, "error": errors[0]}
        try:
            row |= compare.judge(case, results, self.folder)
        except Exception:  # the other cases are still to be judged
            row |= {"right": False, "error": traceback.format_exc()}
        print(format_row(row), flush=True)
        return row


def format_table(rows):
    """Return the rows as a table in Markdown."""
    lines = [
        "| case | ranks | compared with | largest difference | allowed | s | |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    return "\n".join([*lines, *map(format_row, rows)])


def format_row(row):
    """Return a line of the table."""
    difference = f"{row['difference']:.1e}" if "difference" in row else ""
    allowed = f"{row['allowed']:.1e}" if "allowed" in row else ""
    verdict = row.get("note", "") if row["right"] else f"WRONG {row.get('note', '')}"
    cells = [row["name"], row["ranks"], row["like"], difference, allowed, f"{row['seconds']:.1f}", verdict]
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--only", nargs="*", default=[], help="cases, by name")
    parser.add_argument("--faults", nargs="*", default=None, help="faults, by name; without a name: none")
    parser.add_argument("--results", help="a JSON file for all results")
    parser.add_argument("--folder", help="for runs and logs, which are kept; a temporary one by default")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="podscale-ranks-") as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = Suite(options.platform, folder, options.only).run() if options.only != ["none"] else []
        rows += faults.run(options.platform, folder, options.faults)
    print(format_table(rows))
    for row in rows:
        if not row["right"]:
            print(f"\n--- {row['name']}\n{row.get('error', '')}")
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} right, {time.perf_counter() - start:.0f} s")
    if options.results:
        Path(options.results).write_text(json.dumps(rows, indent=1))
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
