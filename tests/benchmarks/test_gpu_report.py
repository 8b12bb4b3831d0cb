"""The report of all stages on a GPU, with stages that need none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_report
from benchmarks.gpu_report import Report, carry_out, markdown, report_on
from benchmarks.gpu_stages import LONGEST, Stage, stages
from benchmarks.http_served import runs
from tests.commands import run_to_end
from tests.patience import PATIENCE_SECONDS, until

ROOT = Path(__file__).parents[2]
FACTS: dict[str, object] = {"device": "NVIDIA Test"}
NEVER = 60.0
"""Longer than any stage here takes, by itself."""


def stage(name: str, code: str, *words: str, seconds: float = NEVER, least: float = 0.0) -> Stage:
    return Stage(name, f"that {name} works", (sys.executable, "-c", code, *words), seconds, least)


def counting(name: str, file: Path, status: int = 0) -> Stage:
    """A stage that writes its name down, and ends with ``status``."""
    code = f"open({str(file)!r}, 'a').write({name + ' '!r}); raise SystemExit({status})"
    return stage(name, code)


def carried_out(file: Path) -> list[str]:
    found = file.read_text().split()
    file.write_text("")
    return found


def test_an_outcome_has_the_results_of_its_stage_and_its_end() -> None:
    wrote = "import json, sys; json.dump({'rate': 3}, open(sys.argv[1], 'w')); print('hello')"
    passed = carry_out(stage("a", wrote, "{json}"), NEVER)
    assert (passed.state, passed.found, passed.tail) == ("passed", {"rate": 3}, "hello\n")
    assert passed.command[-1] == "{json}"
    failed = carry_out(stage("b", "raise SystemExit('no')"), NEVER)
    assert (failed.state, failed.found, failed.tail) == ("failed", None, "no\n")
    torn = carry_out(stage("c", "import sys; open(sys.argv[1], 'w').write('{')", "{json}"), NEVER)
    assert (torn.state, torn.found) == ("passed", None)
    code = "import os, sys; print(sys.argv[1], os.environ['FOR_IT'])"
    asked = replace(stage("d", code, "{seconds}"), variables=(("FOR_IT", "x"),))
    assert carry_out(asked, 50.0).tail == "40 x\n"
    missing = carry_out(replace(stage("e", ""), tool="no-such-tool"), NEVER)
    assert (missing.state, missing.tail) == ("left out", "no-such-tool is not installed")


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
import os
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def test_a_stage_that_hangs_ends_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    outcome = carry_out(stage("hangs", HANGS, str(pid)), 5.0)
    assert outcome.state == "out of time"
    assert outcome.seconds >= 5
    until(lambda: not runs(int(pid.read_text())))


REPORTS = """
import sys
from pathlib import Path
from benchmarks.gpu_report import Report, report_on
from benchmarks.gpu_stages import Stage
command = (sys.executable, "-c", *sys.argv[2:])
stages = [Stage("good", "", (sys.executable, "-c", ""), 60, 0), Stage("bad", "", command, 600, 0)]
report_on(stages, Report({"device": "x"}, Path(sys.argv[1])), 1000, print)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_report_that_is_killed_keeps_what_it_has_and_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    pid, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    reporter = subprocess.Popen(
        [sys.executable, "-c", REPORTS, str(tmp_path / "out"), HANGS, str(pid)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
    )
    try:
        until(pid.exists)
    finally:
        reporter.send_signal(number)
        reporter.wait()
    until(lambda: not runs(int(pid.read_text())), "what a stage has started goes on")
    until(lambda: not list(temporary.iterdir()), "its files stay")
    whole = json.loads((tmp_path / "out.json").read_text())
    assert [(each["name"], each["state"]) for each in whole["stages"]] == [("good", "passed")]


def test_a_report_is_written_though_stages_fail(tmp_path: Path) -> None:
    said: list[str] = []
    chosen = [
        stage("good", "print(1)"),
        stage("bad", "raise SystemExit(3)"),
        replace(stage("gone", ""), tool="no-such-tool"),
    ]
    out = tmp_path / "a folder" / "that is made" / "out"
    assert report_on(chosen, Report(FACTS, out), 1000, said.append) == 1
    whole = json.loads(out.with_suffix(".json").read_text())
    assert whole["facts"] == FACTS
    assert [each["state"] for each in whole["stages"]] == ["passed", "failed", "left out"]
    text = out.with_suffix(".md").read_text()
    assert "- device: NVIDIA Test" in text
    assert "| bad | failed |" in text
    assert "no-such-tool is not installed" in text
    assert said[0] == "good: that good works, at most 60 s"
    assert report_on(chosen[::2], Report(FACTS, out), 1000, said.append) == 0
    assert markdown({}, []).startswith("# On a GPU")
    assert {path.name for path in out.parent.iterdir()} == {"out.json", "out.md"}


def resumed(facts: dict[str, object], out: Path) -> Report:
    report = Report(facts, out)
    report.resume()
    return report


def test_a_rerun_continues_where_the_last_one_stopped(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    said: list[str] = []
    good, bad, other = (counting(name, log, name == "bad") for name in ("good", "bad", "other"))
    assert report_on([good, bad], resumed(FACTS, out), 1000, said.append) == 1
    assert carried_out(log) == ["good", "bad"]
    bad = counting("bad", log)  # repaired
    assert report_on([good, bad, other], resumed(FACTS, out), 1000, said.append) == 0
    assert carried_out(log) == ["bad", "other"]
    assert any(line.startswith("good: has passed at 20") for line in said)
    assert report_on([good, bad, other], resumed(FACTS, out), 1000, said.append, {"other"}) == 0
    assert carried_out(log) == ["other"]
    changed = counting("good", log)
    changed = replace(changed, command=(*changed.command, "another word"))
    assert report_on([changed], resumed(FACTS, out), 1000, said.append) == 0
    assert carried_out(log) == ["good"]
    names = [each["name"] for each in json.loads(out.with_suffix(".json").read_text())["stages"]]
    assert sorted(names) == ["bad", "good", "other"], "what is not asked for this time is lost"


def test_a_stage_that_no_longer_fits_is_skipped_until_the_next_run(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    said: list[str] = []
    small = replace(counting("small", log), seconds=500.0)
    large = replace(counting("large", log), least=500.0, seconds=600.0)
    assert report_on([large, small], resumed(FACTS, out), 300, said.append) == 1
    assert carried_out(log) == ["small"]
    whole = json.loads(out.with_suffix(".json").read_text())["stages"]
    (skipped,) = [each for each in whole if each["state"] == "skipped"]
    assert skipped["name"] == "large"
    assert "s are left, and it takes 500 at least" in skipped["tail"]
    assert f"large: skipped: {skipped['tail']}" in said
    (limit,) = re.findall(r"small: .*, at most (\d+) s$", "\n".join(said), re.M)
    assert 300 - PATIENCE_SECONDS <= int(limit) <= 300
    assert report_on([large, small], resumed(FACTS, out), 1000, said.append) == 0
    assert carried_out(log) == ["large"]


def test_every_stage_is_bounded_and_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    every = stages("python")
    names = [each.name for each in every]
    assert len(set(names)) == len(names)
    assert all(0 < each.least < each.seconds <= LONGEST <= 480 for each in every)
    assert names[-1] == "profile"
    assert gpu_report.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    for option in ("--only", "--again"):
        with pytest.raises(SystemExit) as info:
            gpu_report.main([option, "memcheck,nonsense"])
        assert info.value.code == 2
        assert "no such stage: nonsense" in capsys.readouterr().err


def test_stages_name_programs_and_all_tests_of_one_gpu() -> None:
    collect = (sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q")
    listed = run_to_end(*collect, env={**os.environ, "PYTEST_ADDOPTS": ""}, timeout=240).stdout
    every = {line for line in listed.splitlines() if "::" in line}
    found: set[str] = set()
    for each in stages(sys.executable):
        parts = each.command[-1].split(" or ") if "-k" in each.command else [""]
        for word in each.command:
            if word.startswith("benchmarks."):
                assert (ROOT / f"{word.replace('.', '/')}.py").exists(), word
            if word.startswith("tests/"):
                inside = {name for name in every if name == word or name.startswith(f"{word}::")}
                for part in parts:
                    named = {name for name in inside if part in name}
                    assert named, (word, part)
                    found |= named
    assert {name.partition("::")[2] for name in every - found} == {"test_table_on_a_device_each"}
