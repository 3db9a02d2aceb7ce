"""The corpus, its split, and the shipped prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmtp_kernels.models.presets import BOS, EOS
from dmtp_kernels.training.data import Corpus, batch, held_out_prompts, is_held_out, standard_library


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return standard_library()


def test_split_is_a_function_of_the_path() -> None:
    # values of the hash itself: another machine must hold out the same files
    assert is_held_out("operator.py") and is_held_out("runpy.py")
    assert not is_held_out("abc.py") and not is_held_out("json/decoder.py")


def test_no_file_is_in_both_halves(corpus: Corpus) -> None:
    train, held_out = corpus.split(held_out=False), corpus.split(held_out=True)
    assert train.keys().isdisjoint(held_out)
    assert train.keys() | held_out.keys() == corpus.files.keys()
    assert 0.01 < len(held_out) / len(corpus.files) < 0.1


def test_tests_and_installed_packages_are_left_out(corpus: Corpus) -> None:
    for name in corpus.files:
        assert {"test", "tests", "site-packages", "idle_test"}.isdisjoint(Path(name).parts)


def test_stream_marks_every_file(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"x\xff")
    (tmp_path / "a.py").write_bytes(b"")
    corpus = standard_library(tmp_path)
    stream = torch.cat([corpus.train, corpus.held_out]).tolist()
    assert stream == [BOS, EOS, BOS, ord("x"), 255, EOS]


def test_digest_sees_names_and_contents() -> None:
    digests = {Corpus(files).digest for files in ({"a.py": b"1"}, {"a.py": b"2"}, {"b.py": b"1"}, {})}
    assert len(digests) == 4


def test_batches_depend_on_their_key_alone() -> None:
    stream = torch.arange(1000, dtype=torch.int16)
    first = batch(stream, 4, 10, 0, 1, 2)
    torch.rand(3)
    assert torch.equal(batch(stream, 4, 10, 0, 1, 2), first)
    assert not torch.equal(batch(stream, 4, 10, 0, 1, 3), first)
    assert torch.equal(first - first[:, :1], torch.arange(10).expand(4, 10))


def test_shipped_prompts_are_held_out_text_of_many_lengths(corpus: Corpus) -> None:
    prompts = held_out_prompts()
    lengths = [len(prompt["text"]) for prompt in prompts]
    assert len(prompts) == 64 and min(lengths) == 16 and max(lengths) == 120 and len(set(lengths)) > 48
    assert all(is_held_out(prompt["file"]) and prompt["text"].isascii() for prompt in prompts)


def test_shipped_prompts_start_anywhere_in_a_line(corpus: Corpus) -> None:
    places = []
    for prompt in held_out_prompts():
        text, offset = corpus.files.get(prompt["file"]), prompt["offset"]
        whole = (prompt["text"] + prompt["reference"]).encode()
        # another release of the interpreter has other files
        if text is not None and text[offset : offset + len(whole)] == whole:
            places.append(offset == 0 or text[offset - 1 : offset] == b"\n")
    if not places:
        pytest.skip("this interpreter's files differ from the shipped prompts'")
    assert sum(places) < len(places) / 2
