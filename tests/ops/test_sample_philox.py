"""The generator against Random123's published vectors and a plain-Python Philox; ranges and keys of its draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.sample import philox

WORDS = tuple[int, ...]
# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, output
KNOWN: list[tuple[WORDS, WORDS, WORDS]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _python_philox(counter: WORDS, key: WORDS) -> WORDS:
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_vectors(counter: WORDS, key: WORDS, output: WORDS) -> None:
    assert _python_philox(counter, key) == output
    got = philox.philox4x32(*(torch.tensor(word) for word in (*counter, *key)))
    assert tuple(int(word) for word in got) == output


def test_words_follow_the_documented_counter_layout() -> None:
    seeds = [0, 7, -1, 2**40 + 3, -(2**63)]
    positions = [0, 2**32 - 1, 2**32, -5, 2**62]
    got = philox.words(torch.tensor(seeds), torch.tensor(positions), philox.ACCEPT, 11)
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        s, p = seed % 2**64, position % 2**64
        for index in range(11):
            counter = (index // 4, philox.ACCEPT, p % 2**32, p >> 32)
            assert int(got[i, index]) == _python_philox(counter, (s % 2**32, s >> 32))[index % 4]


def test_more_draws_extend_fewer() -> None:
    seed, position = torch.arange(5), torch.arange(5) * 3
    long = philox.words(seed, position, 0, 1003)
    assert long.shape == (5, 1003)
    for count in (0, 1, 2, 3, 4, 5, 260):
        assert torch.equal(philox.words(seed, position, 0, count), long[:, :count])
    assert torch.equal(philox.words(seed.int(), position.int(), 0, 9), long[:, :9])


def test_row_122_and_123_uniforms_never_reach_0_or_1() -> None:
    ends = philox.to_uniform(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == [2.0**-33, 1 - 2.0**-33]
    exponentials = (-torch.log1p(-ends)).tolist()
    assert exponentials[0] == pytest.approx(2.0**-33, rel=1e-9) and exponentials[1] == pytest.approx(33 * math.log(2))


def test_uniforms_are_uniform_in_every_word_and_bit() -> None:
    words = philox.words(torch.arange(5000), torch.zeros(5000, dtype=torch.int64), 2, 8).numpy()
    n = len(words)
    for column in range(8):
        ones = ((words[:, column, None] >> np.arange(32)) & 1).sum(axis=0)
        assert (np.abs(ones - n / 2) < 4.5 * math.sqrt(n) / 2).all()
    correlation = np.corrcoef(words.astype(np.float64), rowvar=False) - np.eye(8)
    assert np.abs(correlation).max() < 4.5 / math.sqrt(n)


def test_round_positions_differ_between_rounds_and_rows() -> None:
    anchors = torch.arange(1000)[:, None]
    keys = philox.round_position(anchors, torch.arange(256))
    assert keys.unique().numel() == 256_000
    assert int(philox.round_position(torch.tensor(2**40, dtype=torch.int64), 3)) == 2**48 + 3
    assert philox.round_position(torch.tensor([2**30], dtype=torch.int32), 1).tolist() == [2**38 + 1]
