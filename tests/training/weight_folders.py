"""Hugging Face folders of a tiny Llama as people's disks have them: files, index, names of tensors, head."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 11},
    **{"hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"},
}
SIZES = {
    **{"embed_tokens": (11, 8), "norm": (8,), "layers.0.input_layernorm": (8,)},
    **{"layers.0.post_attention_layernorm": (8,), "layers.0.self_attn.q_proj": (8, 8)},
    **{"layers.0.self_attn.k_proj": (4, 8), "layers.0.self_attn.v_proj": (4, 8), "layers.0.self_attn.o_proj": (8, 8)},
    **{"layers.0.mlp.gate_proj": (6, 8), "layers.0.mlp.up_proj": (6, 8), "layers.0.mlp.down_proj": (8, 6)},
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PREFIXES = ("", "language_model.model.", "model.language_model.", "base_model.model.model.", "module.model.", "net.")
QUANT = ("weight_scale", "weight_scale_inv", "qweight", "qzeros", "scales", "weight.absmax", "weight_packed",
          "weight.quant_state.bitsandbytes__nf4", "quant_scale", "input_scale", "SCB", "codebooks")  # fmt: skip
OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin",
          "model_state.pdparams", "model_state.pdparams.index.json", "model-q4.gguf", "adapter_model.safetensors",
          "model.fp16.safetensors", "pytorch_model.safetensors", "__0_0.distcp", "mp_rank_00_model_states.pt",
          "consolidated.00.pth", "tf_model.h5", "flax_model.msgpack")  # fmt: skip
FAULTS = ("absent tensor", "extra tensor", "wrong part", "absent file")


@dataclass(frozen=True)
class Folder:
    """The content of a folder."""

    single: bool = True  # model.safetensors
    parts: bool = False  # other weights, in two files
    index: bool = False  # of the parts
    fault: str = ""  # of FAULTS: the index's fault
    prefix: str = "model."
    quant: str = ""  # of QUANT: a tensor that a quantised model has
    head: str = ""  # "same" as the embedding, or "other"; "": none
    tied: bool = False
    others: tuple[str, ...] = ()  # of OTHERS

    def tensors(self, seed: int) -> dict[str, np.ndarray]:
        """Under their right names."""
        random = np.random.default_rng(seed)
        drawn = {f"model.{name}.weight": random.random(size, np.float32) for name, size in SIZES.items()}
        heads = {"same": drawn[EMBEDDING].copy(), "other": random.random(SIZES["embed_tokens"], np.float32)}
        return drawn | ({HEAD: heads[self.head]} if self.head else {})

    def written(self, seed: int) -> dict[str, np.ndarray]:
        """As they are named in a file."""
        tensors = {
            name.replace("model.", self.prefix, 1) if name != HEAD else self.prefix.removesuffix("model.") + name: array
            for name, array in self.tensors(seed).items()
        }
        return tensors | ({f"model.layers.0.mlp.up_proj.{self.quant}": np.ones(3, np.float32)} if self.quant else {})

    @property
    def source(self) -> int | None:
        """Which weights transformers would read: those of the one file, 0, those of the parts, 1, or none."""
        return 0 if self.single else 1 if self.parts and self.index else None

    @property
    def is_right(self) -> bool:
        """Whether these weights are the model's, of which nothing is left open."""
        sound = self.source is not None and not (self.source and self.fault)
        plain = self.prefix == "model." and not self.quant
        return sound and plain and (self.head != "other" if self.tied else self.head != "")

    def write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": self.tied}))
        if self.single:
            save_file(self.written(0), folder / SINGLE, metadata={"format": "pt"})
        tensors = self.written(1)
        places = {name: PARTS[number % 2] for number, name in enumerate(tensors)}
        for part in PARTS if self.parts else ():
            some = {name: tensors[name] for name in tensors if places[name] == part}
            save_file(some, folder / part, metadata={"format": "pt"})
        first = next(iter(places))
        if self.fault == "absent tensor":
            places["model.layers.0.self_attn.q_proj.bias"] = PARTS[0]
        elif self.fault == "extra tensor":
            del places[first]
        elif self.fault == "wrong part":
            places[first] = PARTS[1]
        elif self.fault == "absent file" and self.parts:
            (folder / PARTS[1]).unlink()
        if self.index:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for name in self.others:
            (folder / name).write_bytes(b"\x80\x02")
