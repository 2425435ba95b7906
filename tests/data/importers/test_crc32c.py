"""The checksum is CRC-32C, for every length and for large messages."""

import numpy as np
import pytest

from oformer.data.importers.crc32c import crc32c, masked


def bit_by_bit(data):
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of the catalogs
        (bytes(32), 0x8A9136AA),  # and the examples of RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_values(data, checksum):
    assert crc32c(data) == checksum


def test_every_length_agrees_with_the_definition():
    data = np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8).tobytes()
    for length in (*range(70), 127, 128, 129, 1000, 2999):
        assert crc32c(data[:length]) == bit_by_bit(data[:length]), length


def test_one_bit_among_millions_is_seen():
    data = np.zeros(3_000_001, np.uint8)
    checksum = crc32c(data)
    for place in (0, 1, 1_234_567, 3_000_000):
        data[place] ^= 16
        assert crc32c(data) != checksum
        data[place] ^= 16


def test_the_mask_turns_and_adds():
    assert masked(0) == 0xA282EAD8
    assert masked(0x8000) == 0xA282EAD9
    assert masked(1) == (0xA282EAD8 + (1 << 17)) & 0xFFFFFFFF
