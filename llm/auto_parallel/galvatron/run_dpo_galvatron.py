"""Teaches Llama or Qwen2 to prefer answers (DPO) by a layer-wise plan: flags, or one JSON file, as PaddleNLP has them.

    python run_dpo_galvatron.py dpo_argument.json
    python run_dpo_galvatron.py --model_name_or_path my-model --train_dataset_path train.jsonl --max_seq_len 4096
    python -m paddle.distributed.launch --nproc_per_node 8 run_dpo_galvatron.py dpo_argument.json

Without galvatron_config_path or degrees the newest plan in configs/ that fits is taken. More: docs/en/finetune.md.
"""

import sys

from paddlenlp_galvatron.cli.pretrain import pretrain

CALLBACKS: list = []  # your own, derived from paddlenlp.trainer.TrainerCallback

if __name__ == "__main__":
    sys.exit(pretrain(__file__, sys.argv[1:], CALLBACKS, task="dpo"))
