"""Plots from `dmtp bench ops` and `gpu_check.sh`: `python -m profiling.page RESULTS.json... --output page.html`.

One file that needs no network: per op and case the speed-up over eager PyTorch (and over torch.compile) and the share
of the limit, which is the op's floor of bytes over the bandwidth measured in the same run, each with its quartiles.
What was not measured is said to be so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dmtp_kernels._files import check_file, write_text
from dmtp_kernels._library import registered
from profiling.command import Parser, command
from profiling.results import Place, Refused, cases, check_verdict, is_result, load

FIRST = "fused_t1_prep"
_NONE = '<span class="none">not measured</span>'
_SPEEDS, _SHARES, _HEIGHT = 260, 210, 22
_LABEL = 60
_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--fg:#1d1f22;--soft:#6a6f76;--line:#dcdfe3;--bar:#2f74c0;--slow:#c2543d;
--share:#3b8f6b;--dot:#a9620a}
@media(prefers-color-scheme:dark){:root{--bg:#16181b;--fg:#e6e8ea;--soft:#9aa1a9;--line:#33383e;--bar:#6aa9ee;
--slow:#ef8a72;--share:#67c29a;--dot:#f0b35c}}
body{margin:2rem auto;max-width:1240px;padding:0 1rem;background:var(--bg);color:var(--fg);
font:15px/1.45 system-ui,"DejaVu Sans",sans-serif}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2.2rem 0 .2rem}p{margin:.2rem 0;color:var(--soft)}
table{border-collapse:collapse;width:100%;margin-top:.8rem}
th{text-align:left;font-weight:600;border-bottom:2px solid var(--line);padding:.3rem .6rem;white-space:nowrap}
td{padding:.16rem .6rem;vertical-align:middle;white-space:nowrap}tr.first td{border-top:1px solid var(--line)}
td.op{font-weight:600}td.case{white-space:normal;min-width:150px}td.case small{word-spacing:.25em}
td.num{text-align:right;font-variant-numeric:tabular-nums}
small{color:var(--soft)}.none{color:var(--soft);font-style:italic}.wrong{color:var(--slow);font-weight:700}
svg{display:block}svg text{fill:var(--fg);font:12px system-ui,"DejaVu Sans",sans-serif}
.axis{stroke:var(--soft);stroke-dasharray:2 2}.track{fill:var(--line);opacity:.45}
.up{fill:var(--bar)}.down{fill:var(--slow)}
.share{fill:var(--share)}.range{stroke:var(--fg);stroke-width:1.4}.dot{fill:var(--dot)}
"""


def page(results: Sequence[dict[str, Any]]) -> str:
    """The whole page, a section a result."""
    body = "\n".join(_section(result) for result in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>dmtp_kernels: ops against eager PyTorch</title><style>{_STYLE}</style></head><body>"
        "<h1>dmtp_kernels: ops against eager PyTorch</h1>"
        "<p>Bars are medians, the thin lines quartiles; the axis of speed-ups is logarithmic, the dashed line is 1, "
        "the dot the speed-up over torch.compile. The limit of an op "
        "is the bytes that a perfect kernel moves over the memory bandwidth measured in the same run. Ops of a few "
        "kilobytes are bound by the call itself, far below it.</p>"
        f"{body}</body></html>\n"
    )


def _section(result: dict[str, Any]) -> str:
    where = result["environment"]
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in where["versions"].items())
    load = ", ".join(f"{x:.1f}" for x in where["load"])
    bandwidth = result.get("bandwidth_gb_s")
    facts = [
        f"{where['threads']} CPU thread{'s' if where['threads'] != 1 else ''}, {where['clock']} time, load {load}",
        f"commit {where['commit'] or 'unknown'}; {versions}",
        "bandwidth "
        + (f"{bandwidth:.1f} GB/s" if bandwidth else "not measured")
        + (f"; sizes are the serving ones over {where['scale']}" if where["scale"] != 1 else "; serving sizes"),
    ]
    measured = _order(result["cases"])
    absent = [op for op in registered() if op not in measured]
    if not any("compiled" in case["speedup"] for case in result["cases"]):
        absent.append("torch.compile")
    if absent:
        facts.append(f"not measured: {', '.join(absent)}")
    rows = "".join(_op_rows(op, result["cases"]) for op in measured)
    return (
        f"<section><h2>{escape(where['device'])}</h2>{''.join(f'<p>{escape(f)}</p>' for f in facts)}<table>"
        "<thead><tr><th>op</th><th>case</th><th>time, ms</th><th>speed-up (logarithmic)</th><th>share of the limit</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _order(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The headline op, then as measured."""
    return sorted(dict.fromkeys(c["op"] for c in cases), key=lambda op: op != FIRST)


def _op_rows(op: str, cases: Sequence[dict[str, Any]]) -> str:
    own = [c for c in cases if c["op"] == op]
    return "".join(_row(case, first=i == 0, scale=_scale(cases)) for i, case in enumerate(own))


def _row(case: dict[str, Any], *, first: bool, scale: float) -> str:
    op = case["entries"]["op"]
    eager, compiled = (case["speedup"].get(name) for name in ("eager", "compiled"))
    sizes = " ".join(f"{escape(name)}&nbsp;{size:,}" for name, size in case["shape"].items())
    name = f"{escape(case['op'])}<br><small>{escape(case['backend'])}</small>" if first else ""
    wrong = "" if case["agrees"] else f' <span class="wrong">wrong: {escape(str(case["disagreement"]))}</span>'
    share = case["share_of_bandwidth"]
    median = op["median"]
    shares = None if share is None else [share, share * median / op["q3"], share * median / op["q1"]]
    against = "eager PyTorch" if case["eager_is"] == "chain" else "the op's reference"
    over = "" if compiled is None else f"; torch.compile {compiled['median']:.2f}&times;"
    return (
        f'<tr{" class=first" if first else ""}><td class="op">{name}</td>'
        f'<td class="case">{escape(case["case"])}{wrong}<br><small>{sizes}</small></td>'
        f'<td class="num">{_ms(median)}<br><small>{_ms(op["q1"])} &ndash; {_ms(op["q3"])}</small></td>'
        f"<td>{_NONE if eager is None else _speedup(eager, compiled, scale)}"
        f"<small>over {against}{over}</small></td>"
        f"<td>{_NONE if shares is None else _share(*shares)}</td></tr>"
    )


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _scale(cases: Sequence[dict[str, Any]]) -> float:
    """Octaves that the axis of speed-ups shows on either side of 1."""
    ends = [s[q] for c in cases for s in c["speedup"].values() for q in ("q1", "q3")]
    return max([1.0, *(abs(math.log2(x)) for x in ends if x > 0)])


def _speedup(eager: dict[str, float], compiled: dict[str, float] | None, octaves: float) -> str:
    """A logarithmic axis with 1 at a fifth of its width, so that slower bars have room to the left."""
    width = _SPEEDS - _LABEL
    one = width / 5

    def at(ratio: float) -> float:
        room = width - one if ratio >= 1 else one
        return one + max(-1.0, min(1.0, math.log2(ratio) / octaves)) * room

    x, low, high = (at(eager[q]) for q in ("median", "q1", "q3"))
    kind = "up" if eager["median"] >= 1 else "down"
    dot = "" if compiled is None else f'<circle class="dot" cx="{at(compiled["median"]):.1f}" cy="11" r="3.5"/>'
    marks = (
        f'<line class="axis" x1="{one:.1f}" y1="0" x2="{one:.1f}" y2="{_HEIGHT}"/>'
        f'<rect class="{kind}" x="{min(x, one):.1f}" y="5" width="{max(abs(x - one), 1):.1f}" height="12"/>'
        f'<line class="range" x1="{low:.1f}" y1="11" x2="{high:.1f}" y2="11"/>{dot}'
    )
    return _svg(marks, _SPEEDS, max(x, high, one) + 6, f"{eager['median']:.2f}&times;")


def _share(share: float, low: float, high: float) -> str:
    width = _SHARES - _LABEL

    def at(value: float) -> float:
        return min(value, 1.0) * width

    marks = (
        f'<rect class="track" x="0" y="5" width="{width}" height="12"/>'
        f'<rect class="share" x="0" y="5" width="{max(at(share), 1):.1f}" height="12"/>'
        f'<line class="range" x1="{at(low):.1f}" y1="11" x2="{at(high):.1f}" y2="11"/>'
    )
    percent = 100 * share
    return _svg(marks, _SHARES, width + 6, f"{percent:.0f} %" if percent >= 1 else f"{percent:.1g} %")


def _svg(marks: str, width: int, x: float, label: str) -> str:
    return (
        f'<svg width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{label}">'
        f'{marks}<text x="{x:.1f}" y="15">{label}</text></svg>'
    )


def results_in(name: str) -> Iterator[dict[str, Any]]:
    """What one file holds: a result, or those of a `gpu_check.sh`.

    Raises:
        Refused: neither, or something that the page shows is missing or wrong.
    """
    data = load(name)
    found = [data] if is_result(data) else []
    if not found and isinstance(data.value, dict) and isinstance(data.value.get("results"), dict):
        found = [place for place in data["results"].items() if is_result(place)]
    if not found:
        raise Refused(f"{name}: holds no result of `dmtp bench ops`")
    for place in found:
        _check(place)
        yield place.value


def _check(run: Place) -> None:
    where = run["environment"]
    for key in ("device", "clock"):
        where[key].text()
    where["threads"].count()
    where["scale"].count()
    for load_average in where["load"].entries():
        load_average.amount()
    for name in (where["commit"], *where["versions"].items()):
        if name.value is not None:
            name.text()
    if run["bandwidth_gb_s"].value is not None:
        run["bandwidth_gb_s"].positive()
    for case in cases(run):
        check_verdict(case)
        case["backend"].text()
        case["eager_is"].text()
        for size in case["shape"].items():
            size.count(least=0)
        for summary in (case["entries"]["op"], *case["speedup"].items()):
            for key in ("median", "q1", "q3"):
                summary[key].positive()
        if case["share_of_bandwidth"].value is not None:
            case["share_of_bandwidth"].amount()


@command("page")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a file that is not what it must be."""
    parser = Parser(prog="python -m profiling.page", description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", help="JSON of `dmtp bench ops` or of gpu_check.sh")
    parser.add_argument("--output", type=Path, required=True, help="the page; what is there is replaced")
    options = parser.parse_args(arguments)
    check_file("--output", options.output)
    results = [r for name in options.results for r in results_in(name)]
    for name in options.results:
        if options.output.exists() and options.output.samefile(name):
            raise ValueError(f"--output: is {options.output}, which is one of the results")
    # a name may hold half a surrogate pair, which no file can
    text = page(results).encode("utf-8", "replace").decode("utf-8")
    write_text("--output", options.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
