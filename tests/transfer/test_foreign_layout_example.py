"""The example of docs/transfer.md runs as it is printed."""

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "transfer.md"


def test_the_worked_example_moves_every_token_to_where_another_engine_keeps_it() -> None:
    section = DOCUMENT.read_text().split("## Using the plan library from another engine")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    assert names["num_checked"] == 50 * 6 * 2  # tokens, layers, and the two groups that each hold them all
