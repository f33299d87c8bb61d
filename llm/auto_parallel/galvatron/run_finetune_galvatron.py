"""Fine-tunes Llama or Qwen2 by a layer-wise plan, with PaddleNLP's conventions: flags, or one JSON file.

    python run_finetune_galvatron.py sft_argument.json
    python run_finetune_galvatron.py --model_name_or_path my-model --dataset_name_or_path data --max_length 2048
    python -m paddle.distributed.launch --nproc_per_node 8 run_finetune_galvatron.py sft_argument.json

Without galvatron_config_path or degrees the newest plan in configs/ that fits is taken. More: docs/en/finetune.md.
"""

import sys

from paddlenlp_galvatron.cli.pretrain import pretrain

CALLBACKS: list = []  # your own, derived from paddlenlp.trainer.TrainerCallback

if __name__ == "__main__":
    sys.exit(pretrain(__file__, sys.argv[1:], CALLBACKS, task="sft"))
