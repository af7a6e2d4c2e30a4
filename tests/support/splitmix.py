"""SplitMix64's finaliser and its inverse in Python integers, to ask the noise for a chosen hash."""

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(value: int) -> int:
    value %= 2**64
    value = (value ^ (value >> 30)) * MIX_1 % 2**64
    value = (value ^ (value >> 27)) * MIX_2 % 2**64
    return value ^ (value >> 31)


def unmix(value: int) -> int:
    """Invert `mix`: undo each xor with the bits above it, highest first, and each product by the inverse factor."""
    for shift, factor in ((31, MIX_2), (27, MIX_1), (30, 1)):
        result = value
        for _ in range(64 // shift):
            result = value ^ (result >> shift)
        value = result * pow(factor, -1, 2**64) % 2**64
    return value


def stream_key_of_first_hash(hashed: int, *, position: int) -> int:
    """Give the stream key under which token id 0 at a position has this hash."""
    return unmix(unmix(hashed) ^ mix(GOLDEN)) ^ (position * GOLDEN % 2**64)
