"""Train `glm-tiny`, the small GLM-5 (`glm_moe_dsa`) checkpoint that ships with specdec.

    python examples/train_glm_tiny.py --out DIR [--device cuda|cpu] [--minutes M] [--smoke]

The text is the running interpreter's standard library, the Python manual where Debian's `python3-doc` is installed, and
conversations written by a seeded generator. A quarter of an hour on one H200 gives the shipped quality; `--smoke` runs
the whole path on a CPU in a few minutes, with a model too small to be of use.
"""

import argparse
import json
import shutil
from pathlib import Path

from glm_tiny.alignment import align_indexers
from glm_tiny.build_data import build_data, load_data
from glm_tiny.model_config import SMOKE_CONFIG, TinyConfig
from glm_tiny.prompt_format import TEMPLATE_PATH
from glm_tiny.training import measure, train
from glm_tiny.vocabulary import write_tokenizer


def main() -> None:
    """Build the data unless it is there, train, write the checkpoint folder and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--data", type=Path, help="folder of the prepared text (default: OUT/data)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=11.5, help="training time; the schedule is a share of it")
    parser.add_argument("--align-minutes", type=float, default=1.5, help="time of the last stage, the indexers alone")
    parser.add_argument("--align-from", type=Path, help="skip training: run the last stage on this checkpoint")
    parser.add_argument("--prompts", type=int, default=200, help="prompts of each measurement")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few steps")
    arguments = parser.parse_args()
    out: Path = arguments.out
    data: Path = arguments.data or out / "data"
    out.mkdir(parents=True, exist_ok=True)

    if not (data / "tokens.npz").exists():
        scale = 30 if arguments.smoke else 1
        build_data(data, num_conversations=30_000 // scale, num_needles=10_000 // scale)
    tokenizer, streams = load_data(data)
    config = SMOKE_CONFIG if arguments.smoke else TinyConfig()
    write_tokenizer(tokenizer, out, max_length=config.max_position_embeddings)
    shutil.copy(TEMPLATE_PATH, out / "chat_template.jinja")
    if arguments.align_from is None:
        train(
            config,
            streams,
            tokenizer,
            out,
            device=arguments.device,
            minutes=arguments.minutes,
            max_steps=12 if arguments.smoke else None,
            tokens_per_step=512 if arguments.smoke else 65_536,
        )
    align_indexers(
        config,
        streams,
        tokenizer,
        arguments.align_from or out,
        out,
        device=arguments.device,
        minutes=arguments.align_minutes,
        max_steps=4 if arguments.smoke else None,
        num_rows=2 if arguments.smoke else 16,
    )
    num_prompts = 1 if arguments.smoke else arguments.prompts
    record = measure(config, streams, tokenizer, out, device=arguments.device, num_prompts=num_prompts)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
