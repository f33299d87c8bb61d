"""The script of `galvatron completion` completes, in bash itself; the other shells get the same words."""

import subprocess

import pytest

ASKED = {
    "galvatron se": {"search"},
    "galvatron plan sc": {"scale", "schema"},
    "galvatron plan scale plan.json --gp": {"--gpus"},
    "galvatron fit qwen2.5-7b --dev": {"--device"},
    "galvatron fit qwen2.5-7b --device h800": {"h800-80gb"},
    "galvatron search --model qwen2.5-7": {"qwen2.5-7b", "qwen2.5-72b"},
    "galvatron fit mixtral-8x7": {"mixtral-8x7b"},
    "galvatron train plan.json --task l": {"lora"},
    "galvatron search qwen2.5-7b --trainer paddlef": {"paddlefleet", "paddleformers"},
    "galvatron plan uniform qwen2.5-7b --mixed_precision f": {"fp16", "fp32"},
}


@pytest.mark.parametrize("line", ASKED)
def test_bash_completes_commands_and_options(galvatron, line):
    script = galvatron("completion", "bash").out
    words = " ".join(line.split())
    asked = f'COMP_WORDS=({words}); COMP_CWORD={len(line.split()) - 1}; _galvatron; echo "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=60, check=True)
    assert set(ran.stdout.split()) == ASKED[line]


def test_other_shells_get_the_same_words(galvatron):
    assert galvatron("completion", "bash").out in galvatron("completion", "zsh").out
    assert "--gpus" in galvatron("completion", "fish").out
