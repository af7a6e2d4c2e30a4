"""Word lists and made-up words that the generators draw from."""

# ruff: noqa: SIM905 (a list of words reads best as words)
import random

COLOURS = (
    "amber azure black blue bronze brown coral copper cream crimson golden green grey indigo ivory jade lemon "
    "lilac lime maroon mint navy ochre olive orange pearl pink plum purple red ruby rust sand scarlet silver teal "
    "violet white"
).split()
NOUNS = (
    "anchor apple arrow badge basin basket beacon bell bird boat bolt book bottle box branch bread bridge brook "
    "brush bucket button cabin cable camel candle canal canoe card carpet castle cave cedar chain chair chalk "
    "cliff clock cloud coat coin comet compass cork cradle crane crown cup curtain desk dish door dragon drum "
    "eagle engine falcon feather fence fern field flag flame flute forest fork fountain fox frame garden gate "
    "glass globe glove goat grape hammer harbor harp hat hawk helmet hill hook horn horse island jar jewel kettle "
    "key kite knot ladder lake lamp lantern leaf lens lion lock loom magnet map marble mask meadow mirror moon "
    "mountain needle nest net oak oar ocean orchard otter owl paddle palm panda paper pearl pencil pepper piano "
    "pillow pine pipe planet plate pocket pond pony pot quill rabbit radio raft rail raven ribbon ring river "
    "robin rocket roof root rope rose saddle sail salmon scarf seed shell shelf shield ship shoe shovel signal "
    "sink sled spear spoon spring stamp star statue stone stool storm table tent thread tiger torch tower train "
    "tree trumpet tunnel turtle valley vase village violin wagon wall watch water well whale wheel whistle willow "
    "window wolf wood"
).split()
VERBS = (
    "water clean paint fix check move pack order sort print read write review test update call visit measure".split()
)
FIRST_NAMES = (
    "Ada Alan Anna Ben Carla Chen Clara David Elena Emil Farah Felix Grace Hana Hugo Ines Ivan Jana Jonas Kenji "
    "Lara Leo Lin Maria Max Mila Nadia Nils Nora Omar Otto Paul Petra Rosa Sam Sara Tariq Tom Uma Vera Yuki Zoe"
).split()
CITIES = (
    "Accra Amsterdam Athens Bangkok Berlin Bogota Boston Cairo Chicago Dakar Delhi Dublin Geneva Hanoi Helsinki "
    "Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Milan Mumbai Nairobi Oslo Paris Prague Quito "
    "Riga Rome Seoul Sofia Sydney Tokyo Toronto Turin Vienna Warsaw Zurich"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ONSETS = "b c d f g h k l m n p r s t v br dr fl gr kl pr st tr".split()
_VOWELS = "a e i o u ai ea io".split()
_CODAS = ("", "", "", "l", "m", "n", "r", "s", "x")


def made_up_word(rng: random.Random) -> str:
    """Give a pronounceable word of two or three syllables that no list holds, so that only copying can produce it."""
    syllables = (rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(2, 3)))
    return "".join(syllables)


def city(rng: random.Random) -> str:
    """Give a city, one time in three one that does not exist."""
    return made_up_word(rng).capitalize() if rng.random() < 0.33 else rng.choice(CITIES)


def person(rng: random.Random) -> str:
    """Give a first name, one time in three an invented one."""
    return made_up_word(rng).capitalize() if rng.random() < 0.33 else rng.choice(FIRST_NAMES)


def thing(rng: random.Random) -> str:
    """Give a noun, often with a colour: "kettle", "blue kettle"."""
    return f"{rng.choice(COLOURS)} {rng.choice(NOUNS)}" if rng.random() < 0.6 else rng.choice(NOUNS)


def file_path(rng: random.Random) -> str:
    """Give a path such as "src/amber/fox.py"."""
    folder = rng.choice(("src", "docs", "data", "notes", "tests", "lib", "config"))
    middle = rng.choice(COLOURS) if rng.random() < 0.5 else made_up_word(rng)
    return f"{folder}/{middle}/{rng.choice(NOUNS)}.{rng.choice(('py', 'txt', 'md', 'json', 'toml'))}"
