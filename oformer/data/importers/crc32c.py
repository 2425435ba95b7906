"""CRC-32C (Castagnoli's polynomial, RFC 3720), the checksum of TFRecord files, in numpy.

A CRC is the remainder of the message, read as a polynomial over the field of two elements, modulo P. So the first half
of a message may be multiplied by x to the power of its distance, reduced modulo P, and added to the second half: the
remainder stays. Each fold halves the message with four table lookups per eight bytes, all of them independent of each
other, until one word is left.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # with the bits reversed, as the bytes are read lowest bit first


@functools.cache
def _bytes_table() -> np.ndarray:
    """The register after one byte, from zero."""
    register = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        register = (register >> np.uint32(1)) ^ np.where(register & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return register


def _applied(columns: np.ndarray, registers: np.ndarray) -> np.ndarray:
    """A linear map of registers, given by its images of the 32 bits."""
    result = np.zeros_like(registers)
    for bit in range(32):
        result ^= np.where((registers >> np.uint32(bit)) & 1, columns[bit], np.uint32(0))
    return result


@functools.cache
def _power(exponent: int) -> np.ndarray:
    """What 2^exponent bytes of zero do to a register."""
    if exponent == 0:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return (bits >> np.uint32(8)) ^ _bytes_table()[bits & 0xFF]
    half = _power(exponent - 1)
    return _applied(half, half)


@functools.lru_cache(maxsize=32)  # of 1 MiB each; records of one size need the same two dozen
def _fold_tables(words: int) -> np.ndarray:
    """By each 16 bits of a word, what the word adds to the last four bytes of that `words` further on."""
    # A register stands for the message times x^32: four zero bytes fewer give the remainder itself.
    zeros = 8 * words - 4
    table = np.zeros((8, 256), np.uint32)
    table[7] = _bytes_table()
    for exponent in range(zeros.bit_length()):
        if zeros >> exponent & 1:
            table[7] = _applied(_power(exponent), table[7])
    for place in range(6, -1, -1):
        table[place] = _applied(_power(0), table[place + 1])
    return np.stack([(table[2 * k + 1][:, None] ^ table[2 * k]).reshape(-1) for k in range(4)])


def crc32c(data: bytes | memoryview | np.ndarray) -> int:
    """The checksum of some bytes."""
    content = np.frombuffer(data, np.uint8)
    register = 0
    if content.size < 16:
        register, rest = 0xFFFFFFFF, content
    else:
        # Zeros in front change nothing, once the register's first value is part of the message.
        message = np.zeros(-(-content.size // 8) * 8, np.uint8)
        start = message.size - content.size
        message[start:] = content
        message[start : start + 4] ^= 0xFF
        words = message.view("<u8")
        while words.size > 1:
            half = words.size // 2
            tables = _fold_tables(words.size - half)
            parts = words[:half].view("<u2").reshape(half, 4)
            added = tables[0][parts[:, 0]]
            for k in range(1, 4):
                added ^= tables[k][parts[:, k]]
            words = words[half:]
            words.view("<u4")[-2 * half :][1::2] ^= added
        rest = words.view(np.uint8)
    table = _bytes_table()
    for byte in rest.tolist():
        register = (register >> 8) ^ int(table[(register ^ byte) & 0xFF])
    return register ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """A checksum as TFRecord stores it, so that a checksum of data that hold checksums stays a good one."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
