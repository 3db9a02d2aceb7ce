"""`dmtp`: generate text, compare the methods, benchmark, train the embedded checkpoint, say what runs here."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dmtp_kernels._cli_errors import one_line_errors
from dmtp_kernels._cli_options import MOST_ROWS, CheckpointOption, JsonOption
from dmtp_kernels.bench.cli import bench_app
from dmtp_kernels.cli_chat import BYTES, SmolLM2Option, Words, load_chat
from dmtp_kernels.cli_formats import (
    BlockOption,
    DrafterOption,
    IdsOption,
    MTPOption,
    TargetOption,
    export_command,
    load_models,
    parse_ids,
    print_ids,
)
from dmtp_kernels.cli_profile import profile_command
from dmtp_kernels.cli_training import compare_command, train_command
from dmtp_kernels.decode.check import compare_outputs
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.evaluate import BASELINE, run_method
from dmtp_kernels.decode.memory import check_fits
from dmtp_kernels.decode.method import METHODS, VERIFY_SHAPED
from dmtp_kernels.decode.request import Completion, Request
from dmtp_kernels.decode.stack import MAX_ROWS, get_method
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.presets import TARGET
from dmtp_kernels.training.data import held_out_prompts

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

app.add_typer(bench_app, name="bench")


@app.command()
@one_line_errors
def generate(
    prompt: Annotated[str | None, typer.Argument(help="text to continue")] = None,
    file: Annotated[Path | None, typer.Option(help="read the prompt from a file")] = None,
    heldout: Annotated[int | None, typer.Option(help="use held-out prompt number N")] = None,
    method: Annotated[str, typer.Option(help=f"one of {', '.join(METHODS)}")] = "dmtp",
    batch: Annotated[int, typer.Option(help="continuations of the prompt, seeds SEED, SEED+1, ...")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to produce at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of the first continuation")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="compare with autoregressive decoding; exit 1 if it differs")
    ] = False,
    ids: IdsOption = None,
    smollm2: SmolLM2Option = False,
    checkpoint: CheckpointOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    mtp: MTPOption = None,
    block_size: BlockOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, printing text as it is produced."""
    text = _prompt(prompt, file, heldout) if ids is None else parse_ids(ids)
    if ids is not None and (prompt, file, heldout) != (None, None, None):
        raise ValueError("prompt: give --ids or a text, not both")
    if not 1 <= batch <= MOST_ROWS:
        raise ValueError(f"batch: is {batch}, must be between 1 and {MOST_ROWS}")
    chosen = get_method(method)
    words = BYTES
    if smollm2:
        if (ids, target, drafter, mtp, block_size) != (None,) * 5:
            raise ValueError("smollm2: takes a text, and no options of another model")
        words, models = load_chat(checkpoint, chosen)
        text = words.encode(text if isinstance(text, bytes) else bytes(text))
    else:
        models = load_models(checkpoint, chosen, target, drafter, mtp, block_size)
    vocabulary = models.target.config.vocab_size
    if ids is None and target is not None and vocabulary != TARGET.vocab_size:
        raise ValueError(f"prompt: is text, must be --ids for a model of {vocabulary} tokens that are not bytes")
    stop = words.stop if ids is None else ()
    requests = [
        Request(tuple(text), max_new_tokens, temperature, top_k, top_p, seed + i, stop_ids=stop) for i in range(batch)
    ]
    limit = models.target.config.max_positions - MAX_ROWS
    longest = max(2, min(limit, len(text) + max_new_tokens))
    check_fits("batch", batch, models, [chosen], longest)
    engine = Engine(models, chosen, max_batch=batch, max_tokens=longest)
    completions = _stream(engine, requests, words, quiet=as_json or ids is not None)
    verdict = _check(models, chosen.name, requests, completions) if check else None
    if as_json:
        print(json.dumps(_generated(chosen.name, completions, verdict, words), indent=1))
    else:
        if ids is not None:
            print_ids(completions)
        _report(completions, verdict, words if ids is None else None)
    if verdict is not None and not verdict["identical"]:
        raise typer.Exit(1)


app.command("profile")(profile_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("train")(train_command)


@app.command()
@one_line_errors
def doctor(as_json: JsonOption = False) -> None:
    """Versions, backends, and which implementation each op runs here."""
    from dmtp_kernels.doctor import render, report

    found = report()
    print(json.dumps(found, indent=1) if as_json else render(found))


def _prompt(prompt: str | None, file: Path | None, heldout: int | None) -> bytes:
    given = [
        name for name, value in (("PROMPT", prompt), ("--file", file), ("--heldout", heldout)) if value is not None
    ]
    if len(given) != 1:
        raise ValueError(f"prompt: give one of PROMPT, --file, --heldout (got {', '.join(given) or 'none'})")
    if file is not None:
        text = file.read_bytes()
    elif heldout is not None:
        prompts = held_out_prompts()
        if not 0 <= heldout < len(prompts):
            raise ValueError(f"heldout: is {heldout}, must be between 0 and {len(prompts) - 1}")
        text = prompts[heldout]["text"].encode()
    else:
        text = (prompt or "").encode(errors="surrogateescape")
    if not text:
        raise ValueError("prompt: is empty, must hold at least one byte")
    return text


@torch.no_grad()
def _stream(engine: Engine, requests: list[Request], words: Words, *, quiet: bool) -> list[Completion]:
    ids = [engine.submit(request) for request in requests]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    single = len(ids) == 1 and not quiet
    if single and words.continues:
        print(words.decode(requests[0].prompt).decode("utf-8", "replace"), end="", flush=True)
    while engine.busy:
        for event in engine.step():
            if single:
                print(decoder.decode(words.decode(event.tokens)), end="", flush=True)
    if single:
        print(decoder.decode(b"", final=True))
    return [engine.completions[i] for i in ids]


def _check(models: Checkpoint, name: str, requests: list[Request], completions: list[Completion]) -> dict[str, Any]:
    plain = run_method(models, METHODS[BASELINE], requests, len(requests)).completions
    shaped = run_method(models, VERIFY_SHAPED, requests, len(requests)).completions
    verdict = compare_outputs(models, completions, plain, shaped)
    return {
        "method": name,
        "identical": verdict.identical,
        "exact": verdict.exact,
        "ties": verdict.ties,
        "mismatches": [list(m) for m in verdict.mismatches],
    }


def _generated(
    name: str, completions: list[Completion], verdict: dict[str, Any] | None, words: Words
) -> dict[str, Any]:
    outputs = [
        {
            "text": words.decode(c.tokens).decode("utf-8", "replace"),
            "tokens": c.tokens,
            "rounds": c.rounds,
            "histogram": c.histogram,
            "finish_reason": c.finish_reason.value if c.finish_reason else None,
        }
        for c in completions
    ]
    return {"method": name, "outputs": outputs} | ({"check": verdict} if verdict else {})


def _report(completions: list[Completion], verdict: dict[str, Any] | None, words: Words | None) -> None:
    if words is not None and len(completions) > 1:
        for index, completion in enumerate(completions):
            print(f"--- {index} (seed {completion.request.seed})")
            if words.continues:
                print(words.decode(completion.request.prompt).decode("utf-8", "replace"), end="")
            print(words.decode(completion.tokens).decode("utf-8", "replace"))
    tokens = sum(len(c.tokens) for c in completions)
    rounds = sum(c.rounds for c in completions)
    print(f"[{tokens} tokens, {rounds} verification rounds]", file=sys.stderr)
    if verdict is not None:
        ties = f", {verdict['ties']} after a tie within float rounding" if verdict["ties"] else ""
        if verdict["identical"]:
            print(
                f"[identical to autoregressive decoding: {len(completions)} of {len(completions)}{ties}]",
                file=sys.stderr,
            )
        else:
            where = ", ".join(f"output {i} at token {at}" for i, at in verdict["mismatches"])
            print(f"[NOT identical to autoregressive decoding: {where}]", file=sys.stderr)


def main() -> None:
    """Entry point of the `dmtp` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # text of any byte must not fail on a terminal's encoding
    app()


if __name__ == "__main__":
    main()
