import pytest

from specdec.cli.memory_size import parse_memory_size
from specdec.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("32.2GB", 32_200_000_000),
        ("141GiB", 141 * 2**30),
        ("80 gb", 80_000_000_000),
        ("1.5e9", 1_500_000_000),
        ("2TiB", 2 * 2**40),
        ("1kB", 1000),
        ("7B", 7),
        ("0.3", 0),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_memory_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.2.3", "141QiB", "1e999", "many", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a size is a number with kB, MB, GB"):
        parse_memory_size(text)
