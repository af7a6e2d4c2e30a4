"""Questions for one line of a long table, in the form that the shipped checkpoint was taught."""

import random

from specdec.engine import Engine

COLOURS = ("red", "blue", "green", "black", "white", "yellow")
NOUNS = (
    "river",
    "stone",
    "table",
    "window",
    "garden",
    "bridge",
    "paper",
    "forest",
    "engine",
    "market",
    "letter",
    "planet",
    "pocket",
    "mirror",
    "button",
    "ladder",
    "candle",
    "hammer",
    "basket",
    "pencil",
)


def needles(engine: Engine, *, depth: float, num_prompts: int = 4) -> tuple[list[list[int]], list[str]]:
    """Prompts, as token ids, and what their answers hold.

    Args:
        engine: Of the shipped checkpoint.
        depth: Where in the table the line stands, 0..1.
        num_prompts: How many.
    """
    generator = random.Random(f"needle {depth}")
    prompts, answers = [], []
    for _ in range(num_prompts):
        keys = generator.sample([f"{colour}_{noun}" for colour in COLOURS for noun in NOUNS], 70)
        values = [str(generator.randint(1000, 9999)) for _ in keys]
        asked = round(depth * (len(keys) - 1))
        table = "\n".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True))
        question = f"Remember this table.\n{table}\nWhat is the value of {keys[asked]}?"
        messages = [{"role": "user", "content": question}]
        prompts.append(engine.apply_chat_template(messages, variables={"enable_thinking": False}))
        answers.append(f"{keys[asked]} = {values[asked]}")
    return prompts, answers
