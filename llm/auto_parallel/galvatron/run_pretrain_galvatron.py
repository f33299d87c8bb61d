"""Pretrains Llama or Qwen2 by a layer-wise plan, with PaddleNLP's conventions: flags, or one JSON file.

    python run_pretrain_galvatron.py --model_name_or_path qwen2.5-0.5b --input_dir data/corpus --max_steps 1000
    python run_pretrain_galvatron.py pretrain.json --learning_rate 1e-4
    python -m paddle.distributed.launch --nproc_per_node 8 run_pretrain_galvatron.py pretrain.json

Without galvatron_config_path the newest plan in configs/ that fits is taken. All options: docs/en/train.md.
"""

import sys

from paddlenlp_galvatron.cli.pretrain import pretrain

CALLBACKS: list = []  # your own, derived from paddlenlp.trainer.TrainerCallback

if __name__ == "__main__":
    sys.exit(pretrain(__file__, sys.argv[1:], CALLBACKS))
