"""Launches of a steady round: the counts that the kernels' pages promise."""

from __future__ import annotations

import json
import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted for the life of a process", allow_module_level=True)

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.method import METHODS
from profiling import collectives, launches


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
    # the eager chain of every op launches many times as much; between the ops both are the same
    assert all(found["eager"][name] >= 5 * stages[name] for name in stages if name != "between")
    assert found["eager"]["between"] == stages["between"]
    # one maximum over keys decides each of T1 and the drafted tokens
    exchanged = found["collectives"]
    assert exchanged["stages"]["t1"] == exchanged["stages"]["draft_head"] == {"fused": 1, "eager": 2}
    assert exchanged["stages"]["target"] == {"fused": 1, "eager": 1}
    assert (exchanged["fused"], exchanged["eager"]) == (3, 5)


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
    assert stages["accept"] == stages["bookkeeping"] == stages["pages"] == stages["commit"] == 1


def test_collectives_of_other_methods_and_of_drawn_candidates() -> None:
    def of(name: str, drawn: bool = False) -> tuple[int, int]:
        found = collectives.of_method(METHODS[name], drawn)
        assert set(found["stages"]) <= {"t1", "draft_head", "target"}
        return found["fused"], found["eager"]

    assert of("dmtp") == (3, 5)
    assert of("dflash") == (2, 3)
    assert of("autoregressive") == (1, 1)
    # a chain selects once a candidate
    assert of("mtp4") == (5, 9)
    # a draw needs whole logits, by either route; T1's embedding stays on its rank
    assert of("dmtp", drawn=True) == (3, 4)


def test_ranks_and_routes_must_agree() -> None:
    stage = {"fused": [1, [5]], "eager": [2, [5]]}
    assert collectives.agreed([{"greedy": {"t1": stage}}] * 2) == {"greedy": {"t1": {"fused": 1, "eager": 2}}}
    for other in ({**stage, "fused": [1, [6]]}, {**stage, "fused": [2, [5]]}):
        with pytest.raises(RuntimeError, match="disagree about greedy t1"):
            collectives.agreed([{"greedy": {"t1": stage}}, {"greedy": {"t1": other}}])
    wrong = {**stage, "eager": [2, [6]]}
    with pytest.raises(RuntimeError, match="disagree"):
        collectives.agreed([{"greedy": {"t1": wrong}}] * 2)
