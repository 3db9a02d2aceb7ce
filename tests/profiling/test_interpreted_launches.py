"""Launches of a steady round: the counts that the kernels' pages promise."""

from __future__ import annotations

import json
import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted for the life of a process", allow_module_level=True)

from dmtp_kernels.decode import round as rounds
from profiling import launches


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    from dmtp_kernels.testing import interpreter

    interpreter.install()


def test_a_round_launches_what_was_promised(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stages = found["stages"]
    promised = {"t1": 4, "pages": 1, "accept": 1, "commit": 1, "bookkeeping": 1}
    assert {name: stages[name] for name in promised} == promised
    assert stages["commit_context"] == 2
    # the eager chain of every op launches many times as much; between the ops both are the same
    assert all(found["eager"][name] >= 5 * stages[name] for name in stages if name != "between")
    assert found["eager"]["between"] == stages["between"]
    # one maximum over keys decides each of T1 and the drafted tokens
    collectives = found["collectives"]
    assert collectives["stages"]["t1"] == collectives["stages"]["draft_head"] == {"fused": 1, "eager": 2}
    assert collectives["stages"]["target"] == {"fused": 1, "eager": 1}
    assert (collectives["fused"], collectives["eager"]) == (3, 5)


def test_the_table_adds_up_and_says_what_its_rows_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.main(["--verification", "block"]) == 0
    lines = capsys.readouterr().out.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("total"))
    rows = [[int(cell.replace(",", "")) for cell in line.split()[1:]] for line in lines[2 : end + 1]]
    assert [sum(column) for column in zip(*rows[:-1], strict=True)] == rows[-1]
    text = "\n".join(lines[end + 1 :])
    assert "bookkeeping is advance_round; between is" in text and "t1 and between hold the loop's own" in text


def test_one_more_launch_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rounds.accept

    def twice(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rounds, "accept", twice)
    assert launches.count()["stages"]["accept"] == 2


def test_methods_without_mtp_have_no_t1_kernels() -> None:
    stages = launches.count("dflash")["stages"]
    assert stages["accept"] == stages["bookkeeping"] == stages["pages"] == 1
    assert "commit" not in stages and stages["commit_context"] == 2
